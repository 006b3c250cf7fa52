"""Reader of `pytorch_model.bin` that needs no torch and runs no code of the file.

A torch file is a zip archive: `<top>/data.pkl` describes the tensors, and `<top>/data/<key>` are
raw storages. They are stored without compression, so they can be memory-mapped. A pickle of weights
calls three functions. Any other name in it is refused, so no code of the file runs.
"""

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
from infinigen_jax.files.regular import countable, map_file, open_regular

LARGEST_PICKLE = 32 << 20  # bytes; 100,000 tensors take 15 MB
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
LARGEST_NUMBER = 1 << 62


class Storage(NamedTuple):
    """Consecutive elements in the archive that the pickle refers to."""

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
    """Tensors of a torch file; `read` returns read-only views of the mapped file."""

    def __init__(self, path: Path):
        self.path = path
        self._map = map_file(path)
        self._checked: set[str] = set()  # members with a verified checksum
        try:
            with open_regular(path) as file, zipfile.ZipFile(file) as archive:
                self._entries = {entry.filename: entry for entry in archive.infolist()}
            pickled = next(name for name in self._entries if name.endswith("data.pkl"))
        except InputError:
            raise
        except Exception as error:  # zipfile raises many types for damaged archives
            raise self._unreadable(error) from None
        self._top = pickled.removesuffix("data.pkl")
        order = f"{self._top}byteorder"
        if order in self._entries and self._member(order, order) != b"little":
            raise InputError(f"{path}: big-endian, which is not supported; save it with torch")
        if (size := self._entries[pickled].file_size) > LARGEST_PICKLE:
            raise InputError(
                f"{path}: {pickled} has {size:,} bytes, more than {LARGEST_PICKLE:,}; "
                "save the model again with torch"
            )
        self.tensors = self._unpickle(bytes(self._member(pickled, pickled)))

    def read(self, name: str) -> np.ndarray:
        """Return a tensor in its stored dtype, not necessarily contiguous."""
        tensor = self.tensors[name]
        storage = tensor.storage
        stored = self._member(f"{self._top}data/{storage.key}", name)
        if storage.count * storage.dtype.itemsize > len(stored):
            raise InputError(f"{self.path}: the data of {name} is truncated; get the file again")
        flat = np.frombuffer(stored, storage.dtype, count=storage.count)
        steps = zip(tensor.shape, tensor.strides, strict=True)
        last = tensor.offset + sum((n - 1) * stride for n, stride in steps)
        count = math.prod(tensor.shape)
        if tensor.offset > flat.size or (count and last >= flat.size):
            raise InputError(f"{self.path}: {name} reaches outside its storage; get the file again")
        if count > flat.size:  # zero strides make any size of a few bytes
            raise InputError(f"{self.path}: {name} repeats its storage; save its copy with torch")
        strides = tuple(stride * flat.dtype.itemsize for stride in tensor.strides)
        begun = flat[tensor.offset :]
        return np.lib.stride_tricks.as_strided(begun, tensor.shape, strides, writeable=False)

    def _member(self, member: str, name: str) -> memoryview:
        """Return a member of the archive, whose checksum is correct; errors call it `name`."""
        entry = self._entries.get(member)
        if entry is None:
            raise InputError(f"{self.path}: the data of {name} is missing; get it again")
        # A local header is 30 bytes plus a name and an extra field. Torch pads the extra field to
        # align the data, so its length can differ from the one in the central directory.
        header = self._map[entry.header_offset : entry.header_offset + 30]
        begin = entry.header_offset + 30 + sum(struct.unpack("<HH", header[26:30].ljust(4)))
        if entry.compress_type != zipfile.ZIP_STORED:  # which torch does not use
            raise InputError(f"{self.path}: {name} is compressed; save the model again with torch")
        stored = memoryview(self._map)[begin : begin + entry.file_size]
        if len(stored) < entry.file_size:
            raise InputError(f"{self.path}: the data of {name} is truncated; get the file again")
        if member not in self._checked and zlib.crc32(stored) != entry.CRC:
            raise InputError(f"{self.path}: {name} is damaged; get the file again")
        self._checked.add(member)
        return stored

    def _unpickle(self, data: bytes) -> dict[str, TorchTensor]:
        try:
            value = read_pickle(data)
        except Refused as error:
            raise InputError(f"{self.path}: {error}") from None
        except Exception as error:  # a damaged pickle can raise nearly anything
            raise InputError(f"{self.path}: damaged ({error}); get the file again") from None
        if not isinstance(value, dict):
            raise InputError(f"{self.path}: holds no dictionary of tensors; not a model file")
        for name, tensor in dict.items(value):  # a pickle may have set an attribute `items`
            if not isinstance(tensor, TorchTensor):
                raise InputError(f"{self.path}: {name!r} is not a tensor; not a model file")
        return dict(value)

    def _unreadable(self, error: Exception) -> InputError:
        start = bytes(self._map[:64])
        if start.startswith(b"version https://git-lfs"):
            why = "it is a Git LFS pointer: fetch the real file with `git lfs pull`"
        elif start.startswith(b"\x80"):
            why = "it is in torch's format from before 1.6: load it and save it again with torch"
        else:
            why = f"it is truncated or of another format ({error}); get it again"
        return InputError(f"{self.path}: not a torch zip file, {why}")


class Refused(Exception):
    """Error for a pickle with anything that a file of weights does not need."""


class StateDictionary(dict):
    """Dictionary of tensors that accepts attributes, in which torch keeps versions of modules."""


def read_pickle(data: bytes) -> Any:
    """Return the object that a pickle describes.

    Raise Refused for a name or value that no file of weights has, and nearly any type of exception
    for a damaged pickle.
    """
    return _Unpickler(io.BytesIO(data)).load()


_PythonUnpickler: Any = pickle._Unpickler


class _Unpickler(_PythonUnpickler):
    """Unpickler in Python: its memo is a dictionary, so a large index allocates nothing."""

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key], [value])

    def load_setitems(self) -> None:
        items = self.pop_mark()
        self._set(items[::2], items[1::2])

    def _set(self, keys: list[Any], values: list[Any]) -> None:
        # The hash of a few nested tuples can take forever.
        if not all(isinstance(key, str) for key in keys):
            raise Refused("refused, because a key in its pickle is not a string")
        self.stack[-1].update(zip(keys, values, strict=True))

    def load_other(self) -> None:
        raise Refused(
            "refused, because its pickle has a set, an array of bytes or a dictionary in one step"
        )

    dispatch = _PythonUnpickler.dispatch | {
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.DICT[0]: load_other,
        pickle.ADDITEMS[0]: load_other,
        pickle.FROZENSET[0]: load_other,
        pickle.BYTEARRAY8[0]: load_other,  # allocates what it claims
    }

    def find_class(self, module: str, name: str) -> Any:
        # Strings and new functions, because a pickle may set attributes of the objects it gets.
        known = {
            ("collections", "OrderedDict"): lambda: StateDictionary(),
            ("torch._utils", "_rebuild_tensor_v2"): lambda *fields: _tensor(*fields),
            ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
        }
        if module == "torch" and name in STORAGES:
            return name
        if (module, name) not in known:
            raise Refused(
                f"refused, because its pickle asks for {module}.{name}, which is not a tensor; "
                "use a safetensors file of the same model"
            )
        return known[module, name]

    def persistent_load(self, pid: Any) -> Storage:
        kind, storage, key, _, count = pid
        names = isinstance(storage, str) and isinstance(key, str)
        if kind != "storage" or not names or storage not in STORAGES:
            raise Refused("refused, because it refers to something other than a tensor storage")
        if type(count) is not int or not 0 <= count < LARGEST_NUMBER:
            raise Refused("damaged, the size of a storage is invalid; get the file again")
        return Storage(STORAGES[storage], key, count)


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> TorchTensor:
    if not isinstance(storage, Storage):
        raise Refused("refused, because it describes a tensor without a storage")
    sizes = (offset, *shape, *strides)
    if not all(type(n) is int and 0 <= n < LARGEST_NUMBER for n in sizes):
        raise Refused("damaged, a size of a tensor is invalid; get the file again")
    if len(shape) != len(strides) or not countable(shape):
        raise Refused("damaged, the shape of a tensor is invalid; get the file again")
    return TorchTensor(storage, offset, tuple(shape), tuple(strides))
