"""Reading `pytorch_model.bin` without torch and without running anything that is inside it.

A torch file is a zip archive: `<top>/data.pkl` describes the tensors, `<top>/data/<key>` are raw
storages, stored without compression and hence memory-mapped here. The pickle is read by an
unpickler that knows tensors and ordered dictionaries and refuses every other name.
"""

import collections
import io
import math
import pickle
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from infinigen_jax.errors import InputError
from infinigen_jax.safetensors_io import map_file

STORAGES = {
    "DoubleStorage": np.dtype(np.float64),
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}


class Storage(NamedTuple):
    """A run of elements in the archive, as the pickle refers to it."""

    dtype: np.dtype
    key: str
    count: int


class TorchTensor(NamedTuple):
    """A strided view of a storage; offset and strides count elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return self.storage.dtype


class TorchFile:
    """The tensors of a torch file; `read` returns read-only views of the mapped file.

    Raises:
        InputError: for a file of another kind, a damaged one, and one that holds other objects.
    """

    def __init__(self, path: Path):
        self.path = path
        self._map = map_file(path)
        self._checked: set[str] = set()  # storages whose checksum is right
        try:
            with zipfile.ZipFile(path) as archive:
                self._entries = {entry.filename: entry for entry in archive.infolist()}
                pickled = next(name for name in self._entries if name.endswith("data.pkl"))
                self._top = pickled.removesuffix("data.pkl")
                data = archive.read(pickled)
                order = f"{self._top}byteorder"
                big_endian = order in self._entries and archive.read(order) != b"little"
        except Exception as error:  # zipfile raises many kinds for damaged archives
            raise self._unreadable(error) from None
        if big_endian:
            raise InputError(f"{path}: written on a big-endian machine, which is not read")
        self.tensors = self._unpickle(data)

    def read(self, name: str) -> np.ndarray:
        """The tensor in its stored dtype; not necessarily contiguous."""
        tensor = self.tensors[name]
        flat = self._storage(tensor.storage, name)
        last = tensor.offset + sum(
            (n - 1) * stride for n, stride in zip(tensor.shape, tensor.strides, strict=True)
        )
        empty = math.prod(tensor.shape) == 0
        smallest = min((tensor.offset, *tensor.strides, *tensor.shape))
        if smallest < 0 or tensor.offset > flat.size or (not empty and last >= flat.size):
            raise InputError(f"{self.path}: {name} reaches outside its storage; get the file again")
        itemsize = flat.dtype.itemsize
        view = np.lib.stride_tricks.as_strided(
            flat[tensor.offset :],
            tensor.shape,
            tuple(stride * itemsize for stride in tensor.strides),
            writeable=False,
        )
        return view

    def _storage(self, storage: Storage, name: str) -> np.ndarray:
        entry = self._entries.get(f"{self._top}data/{storage.key}")
        if entry is None:
            raise InputError(f"{self.path}: the data of {name} is missing; get it again")
        # A local header is 30 bytes plus a name and an extra field, whose length (torch pads it
        # to align the data) can differ from the one in the central directory.
        header = self._map[entry.header_offset : entry.header_offset + 30]
        begin = entry.header_offset + 30 + sum(struct.unpack("<HH", header[26:30].ljust(4)))
        size = storage.count * storage.dtype.itemsize
        if entry.compress_type != zipfile.ZIP_STORED:
            raise InputError(f"{self.path}: {name} is compressed; save the model again with torch")
        if size > min(entry.file_size, len(self._map) - begin):
            raise InputError(f"{self.path}: the data of {name} is truncated; get the file again")
        if storage.key not in self._checked:
            with memoryview(self._map)[begin : begin + entry.file_size] as stored:
                if zlib.crc32(stored) != entry.CRC:
                    raise InputError(f"{self.path}: {name} is damaged; get the file again")
            self._checked.add(storage.key)
        return np.frombuffer(self._map, storage.dtype, count=storage.count, offset=begin)

    def _unpickle(self, data: bytes) -> dict[str, TorchTensor]:
        try:
            value = _Unpickler(data).load()
        except _Refused as error:
            raise InputError(f"{self.path}: {error}") from None
        except Exception as error:  # a damaged pickle can raise nearly anything
            raise InputError(f"{self.path}: damaged ({error}); get the file again") from None
        if not isinstance(value, dict):
            raise InputError(f"{self.path}: holds no dictionary of tensors; not a model file")
        for name, tensor in value.items():
            if not (isinstance(name, str) and isinstance(tensor, TorchTensor)):
                raise InputError(f"{self.path}: {name!r} is not a tensor; not a model file")
        return dict(value)

    def _unreadable(self, error: Exception) -> InputError:
        start = bytes(self._map[:64])
        if start.startswith(b"version https://git-lfs"):
            why = "it is a Git LFS pointer: fetch the real file with `git lfs pull`"
        elif start.startswith(b"\x80"):
            why = "it is in torch's format from before 1.6: load it and save it again with torch"
        else:
            why = f"it is truncated or of another kind ({error}); get it again"
        return InputError(f"{self.path}: not a torch zip file, {why}")


class _Refused(Exception):
    """The pickle asked for something that a file of weights has no use for."""


class _Unpickler(pickle.Unpickler):
    """Builds tensors and ordered dictionaries; imports nothing."""

    def __init__(self, data: bytes):
        super().__init__(io.BytesIO(data))

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, shape, strides, *_: _tensor(
                storage, offset, shape, strides
            )
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda data, *_: data
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        raise _Refused(
            f"refused, because its pickle asks for {module}.{name}, which is not a tensor; "
            "use a safetensors file of the same model"
        )

    def persistent_load(self, reference: Any) -> Storage:
        kind, dtype, key, _, count = reference
        if kind != "storage" or not isinstance(dtype, np.dtype):
            raise _Refused("refused, because it refers to something other than a tensor storage")
        if not isinstance(count, int) or count < 0:
            raise _Refused(f"damaged, a storage of {count!r} elements; get the file again")
        return Storage(dtype, str(key), count)


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any) -> TorchTensor:
    if not isinstance(storage, Storage) or len(shape) != len(strides):
        raise _Refused("refused, because it describes a tensor without a storage")
    return TorchTensor(
        storage, int(offset), tuple(int(n) for n in shape), tuple(int(n) for n in strides)
    )
