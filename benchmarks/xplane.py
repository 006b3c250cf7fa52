"""Reader of traces of `jax.profiler.trace`: operations on a time axis, and their source scopes.

`jax.profiler.ProfileData` reads the events. It omits the compiled programs that the profiler stores
with them, so this module takes those from the file's protocol buffers by field number. Few message
types matter: XSpace, XPlane, HloModule, HloInstruction.
"""

import collections
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jax.profiler import ProfileData

Buffer = memoryview


class Op(NamedTuple):
    """Operation or copy.

    Attributes:
        name: name of the HLO instruction; on a GPU, of the kernel.
        path: source scope, "jit(fused)/layer1/select/..."; "" if unknown.
        start, end: nanoseconds.
        copy: whether it only moves data between host and device.
    """

    line: str
    name: str
    path: str
    start: float
    end: float
    copy: bool


def read(folder: Path) -> list[Op]:
    """Return all operations of the newest trace in a folder, in order of their start."""
    file = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    data = file.read_bytes()
    programs = source_paths(data)
    by_kernel = {
        kernel_name(name): path for names in programs.values() for name, path in names.items()
    }
    ops: list[Op] = []
    for plane in ProfileData.from_serialized_xspace(data).planes:
        on_gpu = plane.name.startswith("/device:GPU")
        if on_gpu or plane.name == "/host:CPU":
            for line in plane.lines:
                if not on_gpu or line.name.startswith("Stream"):
                    ops += _ops(f"{plane.name} {line.name}", line, programs, by_kernel, on_gpu)
    return sorted(ops, key=lambda op: op.start)


def _ops(line_name: str, line: Any, programs: Any, by_kernel: Any, on_gpu: bool) -> list[Op]:
    ops: list[Op] = []
    waiting: dict[Any, int] = {}  # flow id -> index of an operation that may outlast its event
    for event in line.events:
        stats = dict(event.stats)
        end = event.start_ns + event.duration_ns
        name = stats.get("hlo_op")
        if name is None and event.name.startswith("end: "):
            # On the CPU an operation may leave work to other threads; this event marks the end.
            begun = waiting.pop(stats.get("_c"), None)
            if begun is not None:
                ops[begun] = ops[begun]._replace(end=max(ops[begun].end, event.start_ns))
            continue
        if name is None and not on_gpu:
            continue
        program = programs.get(f"{stats.get('hlo_module')}({stats.get('program_id')})")
        path = program.get(name, "") if name is not None and program is not None else ""
        if on_gpu and not path:  # a kernel of a CUDA graph, whose instruction is the whole graph
            path = by_kernel.get(kernel_name(event.name), "")
        copy = on_gpu and "memcpyh2d" in event.name.lower()
        if on_gpu and "memcpyd2h" in event.name.lower():
            continue  # tokens, or rows of a flush: a step does not wait for them
        waiting[stats.get("_p")] = len(ops)
        shown = event.name if on_gpu or name is None else name
        ops.append(Op(line_name, shown, path, event.start_ns, end, copy))
    return ops


def kernel_name(name: str) -> str:
    """Convert an HLO instruction's name to XLA's name of its kernel."""
    return re.sub(r"[^0-9a-zA-Z_]", "_", name)


class _Instruction(NamedTuple):
    name: str
    path: str
    operands: list[int]
    called: list[int]
    computation: int


def source_paths(data: bytes) -> dict[str, dict[str, str]]:
    """Return the source path of each instruction, by compiled program "name(id)" of a trace."""
    programs = {}
    for plane in _all(Buffer(data), 1):
        if b"/host:metadata" not in [bytes(name) for name in _all(plane, 2)]:
            continue
        for entry in _all(plane, 4):
            for metadata in _all(entry, 2):
                name = b"".join(bytes(part) for part in _all(metadata, 2)).decode()
                for stat in _all(metadata, 5):
                    for proto in _all(stat, 6):
                        for module in _all(proto, 1):
                            programs[name] = _module_paths(module)
    return programs


def _module_paths(module: Buffer) -> dict[str, str]:
    """Return paths by instruction name; missing ones come from related instructions."""
    instructions: dict[int, _Instruction] = {}
    members: dict[int, list[int]] = collections.defaultdict(list)
    for computation in _all(module, 3):
        computation_id = _number(computation, 5)
        for proto in _all(computation, 2):
            paths = [bytes(p).decode() for metadata in _all(proto, 7) for p in _all(metadata, 2)]
            name = b"".join(bytes(part) for part in _all(proto, 1)).decode()
            identity = _number(proto, 35)
            instructions[identity] = _Instruction(
                name, "".join(paths), _numbers(proto, 36), _numbers(proto, 38), computation_id
            )
            members[computation_id].append(identity)
    callers = {c: i for i, one in instructions.items() for c in one.called}
    users: dict[int, list[int]] = collections.defaultdict(list)
    for i, one in instructions.items():
        for operand in one.operands:
            users[operand].append(i)

    paths_by_id = {i: one.path for i, one in instructions.items()}

    def settle(near: Any) -> None:
        """Take the most common path among neighbours until nothing changes."""
        changed = True
        while changed:
            changed = False
            for i in instructions:
                if not paths_by_id[i]:
                    paths = [paths_by_id[j] for j in near(i) if paths_by_id.get(j)]
                    if paths:
                        paths_by_id[i] = collections.Counter(paths).most_common(1)[0][0]
                        changed = True

    settle(lambda i: [j for c in instructions[i].called for j in members[c]])
    settle(lambda i: [callers.get(instructions[i].computation, -1)])
    settle(lambda i: users[i])
    settle(lambda i: instructions[i].operands)
    return {one.name: paths_by_id[i] for i, one in instructions.items()}


def _fields(buffer: Buffer) -> Iterator[tuple[int, int | Buffer]]:
    """Yield the fields of an encoded message: numbers, or bytes of longer values."""
    at = 0
    while at < len(buffer):
        tag, at = _varint(buffer, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(buffer, at)
        else:
            size = {1: 8, 5: 4}.get(kind)
            if size is None:
                size, at = _varint(buffer, at)
            value, at = buffer[at : at + size], at + size
        yield tag >> 3, value


def _varint(buffer: Buffer, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = buffer[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def _all(buffer: Buffer, field_number: int) -> list[Buffer]:
    return [v for f, v in _fields(buffer) if f == field_number and isinstance(v, memoryview)]


def _number(buffer: Buffer, field_number: int) -> int:
    return next((v for f, v in _fields(buffer) if f == field_number and isinstance(v, int)), 0)


def _numbers(buffer: Buffer, field_number: int) -> list[int]:
    """Return a repeated number, which is packed."""
    values: list[int] = []
    for value in _all(buffer, field_number):
        at = 0
        while at < len(value):
            one, at = _varint(value, at)
            values.append(one)
    return values
