"""Reader of GGUF files: metadata and tensors, without any knowledge of models.

    4 bytes    "GGUF", then uint32 version, uint64 number of tensors, uint64 number of settings
    settings   name, uint32 kind, value; a string is a uint64 length and UTF-8 bytes
    tensors    name, uint32 number of axes, uint64 sizes (the last axis first), uint32 format,
               uint64 offset from the start of the data
    data       aligned to `general.alignment` (32) bytes

The `gguf` package dequantises. Its reader is not used: it makes several arrays for every token of
the vocabulary, which takes 2.6 s for 49,152 tokens, and a damaged length could exhaust the memory.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from infinigen_jax.errors import InputError, UnsupportedModelError
from infinigen_jax.files.regular import countable, map_file, release_pages

VERSIONS = (2, 3)
SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
PLAIN = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
ALIGNMENT = "general.alignment"


class GgufTensor(NamedTuple):
    """Place and format of a tensor: shape as in NumPy, and kind, a `gguf.GGMLQuantizationType`."""

    shape: tuple[int, ...]
    kind: Any
    begin: int
    size: int

    @property
    def dtype(self) -> np.dtype:
        """Dtype of `GgufFile.read`: as stored, float32 for quantised formats."""
        return PLAIN.get(self.kind.name, PLAIN["F32"])


class GgufFile:
    """Memory-mapped GGUF file; `metadata` has NumPy arrays of numbers and lists of strings."""

    def __init__(self, path: Path):
        self.path, self.package = path, _package(path)
        self._map = map_file(path)
        try:
            reader = _Reader(self._map)
            self.metadata, entries = reader.header()
            self.tensors = self._placed(entries, reader.position)
        except InputError:
            raise
        except (ValueError, struct.error, OverflowError) as error:
            raise InputError(f"{path}: not a valid GGUF file, {error}; get it again") from None

    def read(self, name: str) -> np.ndarray:
        """Return a tensor: a read-only view in its stored dtype, or dequantised to float32."""
        tensor = self.tensors[name]
        raw = np.frombuffer(self._map, np.uint8, count=tensor.size, offset=tensor.begin)
        if tensor.kind.name in PLAIN:
            return raw.view(tensor.dtype).reshape(tensor.shape)
        rows = math.prod(tensor.shape[:-1])
        with np.errstate(all="ignore"):  # damaged scales; the caller checks that values are finite
            whole = self.package.quants.dequantize(raw.reshape(rows, -1), tensor.kind)
        return whole.reshape(tensor.shape)

    def release(self, name: str) -> None:
        tensor = self.tensors[name]
        release_pages(self._map, tensor.begin, tensor.begin + tensor.size)

    def _placed(
        self, entries: Mapping[str, tuple[tuple[int, ...], int, int]], end: int
    ) -> dict[str, GgufTensor]:
        alignment = self.metadata.get(ALIGNMENT, 32)
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f"its {ALIGNMENT} is {alignment!r}")
        start = -(-end // alignment) * alignment
        placed: dict[str, GgufTensor] = {}
        for name, (shape, code, offset) in entries.items():
            kind, block, block_bytes = self._format(name, code)
            if not shape or 0 in shape or not countable(shape) or shape[-1] % block:
                raise ValueError(f"{name} has the impossible shape {shape} for {kind.name}")
            size, begin = math.prod(shape) // block * block_bytes, start + offset
            if begin + size > len(self._map):
                raise ValueError(f"the data of {name} reaches beyond its end: truncated")
            placed[name] = GgufTensor(shape, kind, begin, size)
        reached = start
        for name, tensor in sorted(placed.items(), key=lambda item: item[1].begin):
            if tensor.begin < reached:
                raise ValueError(f"the data of {name} overlaps another tensor's")
            reached = tensor.begin + tensor.size
        return placed

    def _format(self, name: str, code: int) -> tuple[Any, int, int]:
        """Return a format, the elements of a block and its bytes."""
        try:
            kind = self.package.GGMLQuantizationType(code)
            block, size = self.package.GGML_QUANT_SIZES[kind]
            self.package.quants.dequantize(np.zeros((1, size), np.uint8), kind)
        except (ValueError, KeyError, NotImplementedError):
            shown = getattr(locals().get("kind"), "name", f"number {code}")
            raise UnsupportedModelError(
                f"{self.path}: {name} has the format {shown}, which the gguf package cannot "
                "dequantise; quantise the model in another format"
            ) from None
        return kind, block, size


class _Reader:
    """Cursor in the header. Every length is compared with the bytes that remain."""

    def __init__(self, data: mmap.mmap | bytes):
        self.data, self.position = data, 0

    def header(self) -> tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], int, int]]]:
        if self.take(4) != b"GGUF":
            raise ValueError("it does not start with GGUF")
        version = self.scalar("I")
        if version not in VERSIONS:
            raise ValueError(f"its version is {version} instead of {VERSIONS[-1]}")
        tensors, settings = self.scalar("Q"), self.scalar("Q")
        metadata, entries = {}, {}
        for _ in range(self.count(settings, 12)):
            name = self.text()
            metadata[name] = self.value(self.scalar("I"))
        for _ in range(self.count(tensors, 24)):
            name = self.text()
            sizes = tuple(self.scalar("Q") for _ in range(self.count(self.scalar("I"), 8)))
            if name in entries:
                raise ValueError(f"it has two tensors {name}")
            entries[name] = sizes[::-1], self.scalar("I"), self.scalar("Q")
        return metadata, entries

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self.scalar(self.code(kind))
        kind, length = self.scalar("I"), self.scalar("Q")
        if kind == STRING:
            return [self.text() for _ in range(self.count(length, 8))]
        dtype = np.dtype(self.code(kind)).newbyteorder("<")
        return np.frombuffer(self.take(self.count(length, dtype.itemsize) * dtype.itemsize), dtype)

    def code(self, kind: int) -> str:
        if kind not in SCALARS:
            raise ValueError(f"it has a value of the unknown kind {kind}")
        return SCALARS[kind]

    def scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def text(self) -> str:
        return self.take(self.scalar("Q")).decode()

    def count(self, number: int, size: int) -> int:
        """Check that `number` items of at least `size` bytes may follow."""
        if number * size > len(self.data) - self.position:
            raise ValueError("it is truncated")
        return number

    def take(self, size: int) -> bytes:
        begin, self.position = self.position, self.position + self.count(size, 1)
        return self.data[begin : self.position]


def _package(path: Path) -> Any:
    try:
        import gguf
        import gguf.quants
    except ImportError:
        raise InputError(
            f"{path}: GGUF files need the gguf package; pip install 'infinigen-jax[gguf]'"
        ) from None
    return gguf
