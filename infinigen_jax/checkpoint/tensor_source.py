"""Tensors of a checkpoint, whatever its format."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np


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
