"""Work on the slots in use, in arrays that have room for more, as in a server or a conversation."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

UNIT = 1024  # the sizes below the capacity are multiples of it
SHARES = (16, 4)


def smaller_sizes(capacity: int) -> list[int]:
    """Return the sizes below the capacity that programs have work for, ascending.

    None elsewhere than on a CPU: the kernels of a GPU stop at a sequence's end themselves.
    """
    if jax.default_backend() != "cpu":
        return []
    return [size for share in SHARES if (size := capacity // share // UNIT * UNIT)]


def largest_below(tokens: int, capacity: int) -> int:
    """Return the largest of the sizes below the capacity that is too small for these tokens."""
    return max((size for size in smaller_sizes(capacity) if size < tokens), default=0)


def over_used(
    compute: Callable[[int], Any], used: Int[Array, ""], capacity: int, exceeded: int = 0
) -> Any:
    """Return `compute(n)` for the smallest of few sizes n that is not below `used`.

    n is a number of leading slots. The program contains the work for every size above `exceeded`,
    which `used` always exceeds, and runs one, so the results must have equal shapes.
    """
    sizes = [size for size in smaller_sizes(capacity) if size > exceeded]
    if not sizes:
        return compute(capacity)
    number = sum((used > size).astype(jnp.int32) for size in sizes)
    by_size = [functools.partial(compute, n) for n in (*sizes, capacity)]
    # A process without a GPU may compile for one.
    return jax.lax.platform_dependent(
        cpu=lambda: jax.lax.switch(number, by_size), default=by_size[-1]
    )


def padded(x: Shaped[Array, "*b n"], size: int, value: int | float) -> Shaped[Array, "*b m"]:
    """Return x with a last axis of m = `size` elements; `value` fills those after x's own."""
    widths = [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])]
    return jnp.pad(x, widths, constant_values=value)
