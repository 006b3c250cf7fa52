"""The safetensors format: a memory-mapped reader and a streaming writer.

    8 bytes   length n of the header, little endian
    n bytes   JSON: {"name": {"dtype": "F32", "shape": [..], "data_offsets": [begin, end]}, ...}
    the rest  the tensors, back to back, row major

The `safetensors` package checks files, but copies each tensor that it reads, and writes a file from
all of its tensors. Here a tensor costs memory only while it is in use: the reader maps the file,
and the writer hashes and writes one tensor after another.
"""

import hashlib
import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from infinigen_jax.errors import InputError
from infinigen_jax.files.regular import countable, map_file, release_pages

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U32": np.dtype(np.uint32),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

_OTHER_FORMATS = {
    b"version https://git-lfs": "it is a Git LFS pointer: fetch the real file with `git lfs pull`",
    b"PK\x03\x04": "it is a zip archive, perhaps a torch file under a wrong name",
    b"\x80\x02": "it is a pickle, perhaps a torch file under a wrong name",
    b"\x89HDF": "it is an HDF5 file; only safetensors and pytorch_model.bin are read",
    b"GGUF": "it is a GGUF file under a wrong name: end it in .gguf",
    b"<": "it is a web page, not a checkpoint: download the file again",
}


class TensorInfo(NamedTuple):
    """NumPy dtype, shape, and byte range in the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """A safetensors file, memory-mapped as `content`; `read` returns read-only views into it."""

    def __init__(self, path: Path):
        self.path = path
        self.content = map_file(path)
        try:
            safe_open(path, "np")  # checks the whole header; its tensors would be copies
        except MemoryError:
            raise InputError(f"{path}: too large for the memory; free some") from None
        except (SafetensorError, OSError) as error:
            start = bytes(self.content[:64])
            kinds = (why for magic, why in _OTHER_FORMATS.items() if start.startswith(magic))
            why = next(kinds, f"or truncated ({str(error)[:200]})")
            raise self._damaged(why) from None
        (length,) = struct.unpack("<Q", self.content[:8])
        header = json.loads(self.content[8 : 8 + length])
        header.pop("__metadata__", None)
        self.tensors = {name: self._info(name, entry, 8 + length) for name, entry in header.items()}

    def read(self, name: str) -> np.ndarray:
        """Return a tensor as a read-only view of the mapped file, in its stored dtype."""
        info = self.tensors[name]
        count = math.prod(info.shape)
        return np.frombuffer(self.content, info.dtype, count, info.begin).reshape(info.shape)

    def release(self, name: str) -> None:
        """Drop a tensor's pages from this process's memory; views stay valid and read again."""
        info = self.tensors[name]
        release_pages(self.content, info.begin, info.end)

    def _info(self, name: str, entry: Mapping[str, Any], start: int) -> TensorInfo:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if dtype not in DTYPES:
            raise InputError(f"{self.path}: {name} is stored as {dtype}, which is not supported")
        if not countable(shape):
            raise self._damaged(f"{name} has an impossible shape")
        return TensorInfo(DTYPES[dtype], shape, start + begin, start + end)

    def _damaged(self, why: str) -> InputError:
        return InputError(f"{self.path}: not a valid safetensors file, {why}; get it again")


class SafetensorsWriter:
    """Streaming writer of a safetensors file, which hashes the bytes it writes.

    Args:
        file: file open for writing, which `close` leaves open.
        layout: name -> (dtype, shape) of every tensor, in the order of the calls of `add`.
        metadata: strings for the header; transformers expects {"format": "pt"}.
    """

    def __init__(
        self,
        file: BinaryIO,
        layout: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
        metadata: Mapping[str, str] | None = None,
    ):
        self._pending = iter(layout.items())
        self._hash = hashlib.sha256()
        self._size = 0
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        position = 0
        for name, (dtype, shape) in layout.items():
            end = position + math.prod(shape) * np.dtype(dtype).itemsize
            header[name] = {
                "dtype": NAMES[np.dtype(dtype)],
                "shape": list(shape),
                "data_offsets": [position, end],
            }
            position = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # keeps the data aligned for readers that map it
        self._file = file
        self._write(struct.pack("<Q", len(text)) + text)

    @property
    def digest(self) -> bytes:
        """SHA-256 of the bytes written so far."""
        return self._hash.digest()

    def add(self, name: str, tensor: np.ndarray) -> None:
        """Append the next tensor of `layout`; raise ValueError if it does not match."""
        given, expected = (name, (tensor.dtype, tensor.shape)), next(self._pending, None)
        if given != expected:
            raise ValueError(f"tensor {given} written instead of {expected or 'none'}")
        self._write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)

    def close(self) -> dict[str, Any]:
        """Flush to disk; return the file's {"sha256": ..., "size": ...}."""
        if pending := [name for name, _ in self._pending]:
            raise ValueError(f"tensors never written: {', '.join(pending)}")
        self._file.flush()
        os.fsync(self._file.fileno())
        return {"sha256": self._hash.hexdigest(), "size": self._size}

    def _write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._size += len(data)
