"""Reading of files: a model's, regular, of bounded size, perhaps mapped, and the user's texts."""

import io
import json
import math
import mmap
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infinigen_jax.errors import InputError, ParameterError

# The largest known index, of DeepSeek-V3's 91,991 tensors, has 9 MB. Parsed JSON takes up to twenty
# times its size.
LARGEST_JSON = 32 << 20
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # a model has one
MAX_DIMENSIONS, MAX_ELEMENTS = 32, 1 << 60  # of arrays, below NumPy's limits


def expanded(path: str | Path) -> Path:
    """Expand a leading ~; leave it if the user has no home folder, where pathlib would raise."""
    return Path(os.path.expanduser(path))


def absolute(path: str | Path) -> Path:
    """Return the absolute form of a path, with a leading ~ expanded; links are not followed."""
    return Path(os.path.abspath(expanded(path)))


def open_regular(path: Path, most: int | None = None) -> io.BufferedReader:
    """Open a regular file for reading; follow links, because Hugging Face's cache consists of them.

    Raise InputError if it is missing, unreadable, too large, or a pipe or device that could block.
    """
    try:
        status = os.stat(path)  # before opening, which some devices take for a command
        if not stat.S_ISREG(status.st_mode):
            raise InputError(
                f"{path}: cannot be read (not a regular file); put a file in its place"
            )
        if most is not None and status.st_size > most:
            raise InputError(
                f"{path}: too large ({status.st_size:,} bytes; at most {most:,} are read); "
                "download it again"
            )
        return open(path, "rb")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; the folder is incomplete") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None


def read_json(path: Path, remedy: str = "download it again") -> dict[str, Any]:
    if not os.path.lexists(path):
        raise InputError(f"{path}: missing; {remedy}")
    try:
        with open_regular(path, LARGEST_JSON) as file:
            value = json.loads(file.read().decode("utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error}); {remedy}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: not a JSON object; {remedy}")
    return value


def read_text(parameter: str, name: str | Path, most: int = -1) -> str:
    """Read at most `most` characters of a parameter's text file, with "\\n" as line breaks."""
    path = expanded(name)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            text = file.read(most)
    except UnicodeDecodeError:
        raise ParameterError(parameter, "not UTF-8 text; convert it first", path) from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = getattr(error, "strerror", None) or error
        raise ParameterError(parameter, f"{reason}; give a text file", path) from None
    if not text:
        raise ParameterError(parameter, "the file is empty; give some text", path)
    return re.sub("\r+\n|\r", "\n", text)  # files converted twice may have "\r\r\n"


def countable(shape: Sequence[int]) -> bool:
    """Return whether an array can have this shape; empty arrays have strides too."""
    possible = len(shape) <= MAX_DIMENSIONS and all(size >= 0 for size in shape)
    return possible and math.prod(max(size, 1) for size in shape) <= MAX_ELEMENTS


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
    if isinstance(mapped, mmap.mmap):
        begin -= begin % mmap.PAGESIZE
        mapped.madvise(mmap.MADV_DONTNEED, begin, end - begin)
