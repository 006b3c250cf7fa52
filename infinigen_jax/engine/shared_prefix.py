"""A beginning that several prompts share: read once, and stored once on the host.

    prefix     | read alone, as a batch of one |
    sequence 0                                 | its own tokens |
    sequence 1                                 | its own tokens ....... |

What is on the device (dense layers, the policy's state, recent rows) each sequence has for itself.
On the host the rows of whole shared slots are stored once for the batch (`memory` shows how); the
last few of the prefix, at least a window, are copied, as a flush may write them again.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from infinigen_jax.cache.host_array import Placement, allocate_host
from infinigen_jax.cache.layers import Cache
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.engine.batching import copy_rows
from infinigen_jax.errors import InputError
from infinigen_jax.models import ModelConfig

UNIT = 128  # slots of a sequence's own come in multiples of it


class Sharing(NamedTuple):
    """What is shared of a batch's caches.

    Attributes:
        tokens: of the prefix.
        rows: rows of the host's array for the shared slots, each as long as a sequence's own.
        own: slots of each sequence on the host that are its own.
    """

    tokens: int
    rows: int
    own: int

    @property
    def capacity(self) -> int:
        """Slots of each sequence, shared or not."""
        return (self.rows + 1) * self.own

    def host_rows(self, batch: int) -> int:
        """Of the host's array, for so many sequences."""
        return batch + self.rows


def common_prefix(prompts: Sequence[list[int]]) -> int:
    """How many tokens all prompts begin with, short of the whole of one."""
    least = min(map(len, prompts)) - 1
    first, last = min(prompts), max(prompts)  # all others are between them, in order
    return next((i for i in range(least) if first[i] != last[i]), least)


def may_share(config: ModelConfig, longest: int) -> bool:
    """Whether a prefix has the same keys in prompts of any length up to the longest.

    Not with a base of rotary positions that grows with the prompt.
    """
    rope = config.rope
    return rope is None or rope.kind != "dynamic" or longest <= rope.original_positions


def plan_sharing(decoder: Decoder, prefix: int, tokens: int, batch: int) -> Sharing:
    """How to store a prefix of sequences of up to `tokens`, in the fewest slots.

    Raises:
        InputError: for a decoder whose prompts cannot be read in parts.
    """
    if decoder.pool is not None:
        raise InputError("--pool-tokens: not with a shared prefix; leave one of them out")
    if decoder.mesh.shape["data"] > 1:
        raise InputError("--prefix: not for sequences on several devices; give whole prompts")
    most = -(-max(tokens, decoder.policy.window) // UNIT) * UNIT
    choices = [Sharing(prefix, 0, most)]
    for own in range(UNIT, most, UNIT):
        choices.append(Sharing(prefix, max(0, prefix - decoder.policy.window) // own, own))
    return min(
        (choice for choice in choices if choice.capacity >= most),
        key=lambda choice: (choice.host_rows(batch) * choice.own, choice.rows),
    )


def spread(decoder: Decoder, one: Cache, batch: int, sharing: Sharing) -> Cache:
    """Caches of `batch` sequences that have the prefix, from that of one sequence of its own.

    Args:
        one: of the capacity of `sharing`; stays as it is.
    """
    at = Placement(decoder.mesh)
    cache = _repeat(decoder)(one._replace(host=None), batch)
    if one.host is None:
        return cache
    layers, _, heads, _, width = one.host.shape
    rows, own = sharing.host_rows(batch), sharing.own
    host = allocate_host((layers, rows, heads, own, width), one.host.dtype, decoder.mesh)
    # The source's slot of each row's first, and how many there are of the prefix.
    starts = [sharing.rows * own] * batch + [i * own for i in range(sharing.rows)]
    for row, start in enumerate(starts):
        count = min(own, sharing.tokens - start)
        numbers = (jax.device_put(np.int32(i), at.whole) for i in (row, start, count))
        host = _copy(decoder)(host, one.host, *numbers)
    return cache._replace(host=host)


@functools.lru_cache(maxsize=64)
def _repeat(decoder: Decoder) -> Any:
    def repeat(one: Cache, batch: int) -> Cache:
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, *x.shape[1:])), one)

    at: Any = Placement(decoder.mesh)
    cache = Cache(None, at.rows, at.rows, at.batch, at.rows, at.rows, at.rows)
    return jax.jit(repeat, static_argnums=1, out_shardings=cache)


@functools.lru_cache(maxsize=64)
def _copy(decoder: Decoder) -> Any:
    def copy(
        host: Shaped[Array, "l a k t w"],
        one: Shaped[Array, "l 1 k s w"],
        row: Int[Array, ""],
        start: Int[Array, ""],
        count: Int[Array, ""],
    ) -> Shaped[Array, "l a k t w"]:
        return copy_rows(host, one, row, start, count, decoder)

    return jax.jit(copy, donate_argnums=0, out_shardings=Placement(decoder.mesh).host)
