"""Tensors of a checkpoint, whatever its format."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from infinigen_jax.errors import UnsupportedModelError


class TensorSource(NamedTuple):
    """A tensor in a checkpoint: its name, file, shape and dtype, and functions for its data.

    `read` may return a view of the mapped file; `release` drops the pages that were read. A matrix
    that the file holds in a few `bits` per number, next to its scales, has the dtype of its values.
    """

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]
    release: Callable[[], None] = lambda: None
    bits: int | None = None


def is_float(tensor: TensorSource) -> bool:
    return tensor.dtype.kind not in "iub"  # NumPy does not call FP8 and bfloat16 floating point


def refusal_of(*parts: TensorSource | None) -> UnsupportedModelError:
    """Return the refusal of a quantised matrix in these parts; at least one is not None."""
    given = [part for part in parts if part is not None]
    shapes = ", ".join(f"{part.name} {list(part.shape)} {part.dtype}" for part in given)
    problem = f"damaged, or not one of the supported formats in 4 and 8 bits: {shapes}"
    return UnsupportedModelError(f"{given[0].file}: {problem}; get other files")
