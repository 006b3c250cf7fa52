"""Reading what `jax.profiler.trace` wrote: operations on a time axis, and where each comes from.

Events are read with `jax.profiler.ProfileData`. What it does not give are the compiled programs
that the profiler stores beside them; those are taken from the file's protocol buffers directly, of
which few message types matter here (XSpace, XPlane, HloModule, HloInstruction), by field number.
"""

import collections
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jax.profiler import ProfileData

Buffer = memoryview


class Op(NamedTuple):
    """An operation that ran, or a copy.

    Attributes:
        line: the thread or stream that it ran on.
        name: of the HLO instruction, or of the kernel where that is not known.
        path: what the source calls it, "jit(fused)/layer1/select/..."; "" where unknown.
        start, end: nanoseconds.
        copy: it moves data between host and device and computes nothing.
    """

    line: str
    name: str
    path: str
    start: float
    end: float
    copy: bool


def read(folder: Path) -> list[Op]:
    """All operations of the newest trace in a folder, in order of their start."""
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
    waiting: dict[Any, int] = {}  # flow id -> index of an operation that may go on after its event
    for event in line.events:
        stats = dict(event.stats)
        end = event.start_ns + event.duration_ns
        name = stats.get("hlo_op")
        if name is None and event.name.startswith("end: "):
            # On the CPU an operation may leave work to other threads; this event marks its end.
            begun = waiting.pop(stats.get("_c"), None)
            if begun is not None:
                ops[begun] = ops[begun]._replace(end=max(ops[begun].end, event.start_ns))
            continue
        if name is None and not on_gpu:
            continue
        program = programs.get(f"{stats.get('hlo_module')}({stats.get('program_id')})")
        if name is not None and program is not None:
            path = program.get(name, "")
        else:  # a kernel of a CUDA graph, which may not tell the instruction, but has its name
            path = by_kernel.get(kernel_name(event.name), "")
        copy = on_gpu and "memcpyh2d" in event.name.lower()
        if on_gpu and "memcpyd2h" in event.name.lower():
            continue  # the tokens, or rows of a flush: nothing that a step waits for
        waiting[stats.get("_p")] = len(ops)
        ops.append(Op(line_name, name or event.name, path, event.start_ns, end, copy))
    return ops


def kernel_name(name: str) -> str:
    """An HLO instruction's name as XLA makes a kernel's name of it."""
    return re.sub(r"[^0-9a-zA-Z_]", "_", name)


class _Instruction(NamedTuple):
    name: str
    path: str
    operands: list[int]
    called: list[int]
    computation: int


def source_paths(data: bytes) -> dict[str, dict[str, str]]:
    """Of every compiled program in a trace, "name(id)", the source path of each instruction."""
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
    """Paths by instruction name; where the compiler kept none, that of what it belongs to."""
    instructions: dict[int, _Instruction] = {}
    members: dict[int, list[int]] = collections.defaultdict(list)
    for computation in _all(module, 3):
        number = _number(computation, 5)
        for proto in _all(computation, 2):
            paths = [bytes(p).decode() for metadata in _all(proto, 7) for p in _all(metadata, 2)]
            name = b"".join(bytes(part) for part in _all(proto, 1)).decode()
            identity = _number(proto, 35)
            instructions[identity] = _Instruction(
                name, "".join(paths), _numbers(proto, 36), _numbers(proto, 38), number
            )
            members[number].append(identity)
    callers = {c: i for i, one in instructions.items() for c in one.called}
    users: dict[int, list[int]] = collections.defaultdict(list)
    for i, one in instructions.items():
        for operand in one.operands:
            users[operand].append(i)

    found = {i: one.path for i, one in instructions.items()}

    def settle(near: Any) -> None:
        """Take the commonest path among neighbours, until nothing changes."""
        changed = True
        while changed:
            changed = False
            for i in instructions:
                if not found[i]:
                    paths = [found[j] for j in near(i) if found.get(j)]
                    if paths:
                        found[i] = collections.Counter(paths).most_common(1)[0][0]
                        changed = True

    settle(lambda i: [j for c in instructions[i].called for j in members[c]])
    settle(lambda i: [callers.get(instructions[i].computation, -1)])
    settle(lambda i: users[i])
    settle(lambda i: instructions[i].operands)
    return {one.name: found[i] for i, one in instructions.items()}


def _fields(buffer: Buffer) -> Iterator[tuple[int, int | Buffer]]:
    """The fields of an encoded message: numbers, or the bytes of what is longer."""
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


def _all(buffer: Buffer, number: int) -> list[Buffer]:
    return [v for f, v in _fields(buffer) if f == number and isinstance(v, memoryview)]


def _number(buffer: Buffer, number: int) -> int:
    return next((v for f, v in _fields(buffer) if f == number and isinstance(v, int)), 0)


def _numbers(buffer: Buffer, number: int) -> list[int]:
    """A repeated number, packed or not."""
    values: list[int] = []
    for field, value in _fields(buffer):
        if field != number:
            continue
        if isinstance(value, int):
            values.append(value)
            continue
        at = 0
        while at < len(value):
            one, at = _varint(value, at)
            values.append(one)
    return values
