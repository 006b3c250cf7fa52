"""Memory-mapped files, and the sizes of arrays that they may claim."""

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from infinigen_jax.errors import InputError
from infinigen_jax.files.regular import open_regular

MAX_DIMENSIONS, MAX_ELEMENTS = 32, 1 << 60  # below NumPy's limits


def countable(shape: Sequence[int]) -> bool:
    """Return whether an array can have this shape, without computing a much larger number."""
    if len(shape) > MAX_DIMENSIONS:
        return False
    count = 1
    for size in shape:
        count *= max(size, 1)  # empty arrays have strides too
        if size < 0 or count > MAX_ELEMENTS:
            return False
    return True


def map_file(path: Path) -> mmap.mmap | bytes:
    """Map a file read-only. Return b"" for an empty file, which cannot be mapped."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size == 0:
            return b""
        try:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from None


def release_pages(mapped: mmap.mmap | bytes, begin: int, end: int) -> None:
    """Drop the pages of a mapped range, which count as memory of the process once they are read."""
    if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        begin -= begin % mmap.PAGESIZE
        mapped.madvise(mmap.MADV_DONTNEED, begin, end - begin)
