"""Interpreter of a torch file's pickle that does not use Python's unpickler.

A file of weights needs few pickle operations: numbers, strings, containers, and calls of four
functions. This interpreter has no others. It imports nothing and calls nothing else. The size of
the pickle bounds its memory: a memo index, a length or a hash of nested tuples allocates nothing.
"""

import pickletools
from collections.abc import Callable
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
    """The pickle contains something that a file of weights does not need."""


def read_pickle(data: bytes) -> Any:
    """Return the object that a pickle describes.

    Raises:
        Refused: the pickle has an operation, name or value that no file of weights has.
        Exception: nearly any type, if the pickle is damaged.
    """
    machine = _Machine()
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name == "STOP":
            return machine.stack.pop()
        machine.run(opcode.name, argument)
    raise Refused("damaged, its pickle has no end; get the file again")


class _Machine:
    """Stack and memo of a pickle; `run` executes one operation."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, name: str, argument: Any) -> None:
        if name in _VALUES:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name]())
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self.memo[len(self.memo) if argument is None else argument] = self.stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            self.stack.append(self.memo[argument])
        elif name in _OPERATIONS:
            _OPERATIONS[name](self)
        elif name == "GLOBAL":
            self.stack.append(_global(*argument.split(" ", 1)))
        elif name not in ("PROTO", "FRAME"):
            raise Refused(f"refused, because its pickle has the operation {name}")

    def mark(self) -> None:
        self.marks.append(len(self.stack))

    def since_mark(self) -> list[Any]:
        return self.last(len(self.stack) - self.marks.pop())

    def last(self, count: int) -> list[Any]:
        if not 0 <= count <= len(self.stack):
            raise Refused("damaged, its pickle pops an empty stack; get the file again")
        values = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return values

    def make_tuple(self, values: list[Any]) -> None:
        self.stack.append(tuple(values))

    def append(self, values: list[Any]) -> None:
        self._target(list).extend(values)

    def set_items(self, values: list[Any]) -> None:
        keys = values[::2]
        if not all(isinstance(key, str) for key in keys):
            raise Refused("refused, because a key in its pickle is not a string")
        self._target(dict).update(zip(keys, values[1::2], strict=True))

    def build(self) -> None:
        """Ignore attributes; those of a state dictionary are versions of its modules."""
        self.last(1)
        self._target(dict)

    def look_up(self) -> None:
        module, name = self.last(2)
        self.stack.append(_global(module, name))

    def call(self) -> None:
        function, arguments = self.last(2)
        if not isinstance(function, _Function) or not isinstance(arguments, tuple):
            raise Refused("refused, because its pickle calls something other than a function")
        self.stack.append(function.call(*arguments))

    def refer(self) -> None:
        self.stack.append(_storage(*self.last(1)))

    def _target(self, kind: type) -> Any:
        if not self.stack or not isinstance(self.stack[-1], kind):
            raise Refused(f"damaged, its pickle fills something other than a {kind.__name__}")
        return self.stack[-1]


class _Function(NamedTuple):
    """A function that a pickle may call."""

    call: Callable[..., Any]


_VALUES = frozenset(
    "BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE BINUNICODE8".split()
)
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
}
_OPERATIONS: dict[str, Callable[[_Machine], None]] = {
    "MARK": _Machine.mark,
    "TUPLE": lambda machine: machine.make_tuple(machine.since_mark()),
    "TUPLE1": lambda machine: machine.make_tuple(machine.last(1)),
    "TUPLE2": lambda machine: machine.make_tuple(machine.last(2)),
    "TUPLE3": lambda machine: machine.make_tuple(machine.last(3)),
    "APPEND": lambda machine: machine.append(machine.last(1)),
    "APPENDS": lambda machine: machine.append(machine.since_mark()),
    "SETITEM": lambda machine: machine.set_items(machine.last(2)),
    "SETITEMS": lambda machine: machine.set_items(machine.since_mark()),
    "BUILD": _Machine.build,
    "STACK_GLOBAL": _Machine.look_up,
    "REDUCE": _Machine.call,
    "BINPERSID": _Machine.refer,
}


def _global(module: Any, name: Any) -> Any:
    """Look up a name of the pickle in the list of known names; import nothing."""
    known = {
        ("collections", "OrderedDict"): _Function(dict),
        ("torch._utils", "_rebuild_tensor_v2"): _Function(_tensor),
        ("torch._utils", "_rebuild_parameter"): _Function(lambda data, *_: data),
    }
    if not isinstance(module, str) or not isinstance(name, str):
        raise Refused(
            "damaged, its pickle looks up something other than a name; get the file again"
        )
    if module == "torch" and name in STORAGES:
        return STORAGES[name]
    if (module, name) not in known:
        raise Refused(
            f"refused, because its pickle asks for {module}.{name}, which is not a tensor; "
            "use a safetensors file of the same model"
        )
    return known[module, name]


def _storage(reference: Any) -> Storage:
    kind, dtype, key, _, count = reference
    if kind != "storage" or not isinstance(dtype, np.dtype) or not isinstance(key, str):
        raise Refused("refused, because it refers to something other than a tensor storage")
    if type(count) is not int or not 0 <= count < LARGEST_NUMBER:
        raise Refused("damaged, the size of a storage is invalid; get the file again")
    return Storage(dtype, key, count)


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> TorchTensor:
    if not isinstance(storage, Storage):
        raise Refused("refused, because it describes a tensor without a storage")
    sizes = (offset, *shape, *strides)
    if not all(type(n) is int and 0 <= n < LARGEST_NUMBER for n in sizes):
        raise Refused("damaged, a size of a tensor is invalid; get the file again")
    if len(shape) != len(strides) or not countable(shape):
        raise Refused("damaged, the shape of a tensor is invalid; get the file again")
    return TorchTensor(storage, offset, tuple(shape), tuple(strides))
