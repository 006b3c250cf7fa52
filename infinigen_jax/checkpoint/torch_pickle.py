"""Restricted unpickling of the description of a torch file's tensors.

A file of weights calls three functions. Any other name is refused, so no code of the file runs.
"""

import io
import pickle
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from infinigen_jax.files.mapped import countable

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
