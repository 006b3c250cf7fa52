"""Breakdown of a decode step's time, from a profiler's trace of a few steps.

Every instant between the first and the last operation of the trace belongs to one part, so the
parts add up to the step:

    speculation, selection, transfer, attention, mlp, sampling, other
                    the operation that computes at that instant (the one that started last)
    exposed wait    nothing computes while rows are transferred
    idle            nothing runs: the device waits for work

`transfer` is time in which the compute stream itself moves rows: always on the CPU, and for XLA's
gather on a GPU. The result also has the total time of transfers, and the share of it in which other
work computed (hidden).

The scope of an operation (`jax.named_scope`), which XLA keeps with every instruction, determines
its part. A kernel without a scope counts to the part of its neighbours. The profiler stores scopes
in the compiled programs, which `jax.profiler.ProfileData` omits. They are read from the file's
protocol buffers by field number.
"""

import collections
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData

SCOPES = {
    "speculate": "speculation",
    "select": "selection",
    "fetch": "transfer",
    "attention": "attention",
    "tail": "attention",
    "mlp": "mlp",
    "wait": "exposed wait",
    "sample": "sampling",
}
PARTS = (*dict.fromkeys(SCOPES.values()), "other", "idle")
SHOWN = 16  # operations in a breakdown
GATHER_KERNEL = "gather_rows"  # of the cuda transfer
# The beginning of the names of the package's kernels.
KERNELS = {
    GATHER_KERNEL: "transfer",
    "index_scores": "speculation",
    "select_rows": "selection",
    "replace_entries": "selection",
    "attend_rows": "attention",
    "index_rest": "attention",
}


class Op(NamedTuple):
    """Operation or copy; times are nanoseconds."""

    line: str
    name: str  # of the HLO instruction; on a GPU, of the kernel
    path: str  # source scope, "jit(fused)/layer1/select/..."; "" if unknown
    start: float
    end: float
    copy: bool  # whether it only moves data between host and device


def breakdown(run: Callable[[], Any], steps: int) -> dict[str, Any]:
    """Trace `run`, which does `steps` steps and waits; return `account`, milliseconds per step."""
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # it slows the traced code
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        return account(read(Path(folder)), steps)


def account(ops: Sequence[Op], steps: int) -> dict[str, Any]:
    """Divide the time from the first to the last operation among the parts.

    Returns:
        step_ms; parts_ms, by part, which sum to it; operations_ms, the longest by name;
        transfer_ms, the time of transfers; hidden_share of that; guessed_share, the share of the
        step whose part was taken from neighbours.
    """
    if not ops:
        raise ValueError("the trace shows no operations")
    parts, guessed = _parts(ops)
    separate = [op.copy or op.name.startswith(GATHER_KERNEL) for op in ops]  # not on compute's line
    changes = sorted({time for op in ops for time in (op.start, op.end)})
    spent: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    moving = hidden = uncertain = 0.0
    begun, active = 0, []
    for now, then in zip(changes, changes[1:], strict=False):
        active = [i for i in active if ops[i].end > now]
        while begun < len(ops) and ops[begun].start <= now:
            if ops[begun].end > now:
                active.append(begun)
            begun += 1
        length = then - now
        computing = [i for i in active if not separate[i] and parts[i] != "exposed wait"]
        # Rows move in a copy and in operations traced as a fetch. Work after it in the list of
        # active operations started later: inside it (a loop's body), or concurrently.
        fetching = [i for i in active if ops[i].copy or parts[i] == "transfer"]
        other = [i for i in computing if parts[i] != "transfer"]
        main = other if other and _on_other_line(ops, other, fetching) else computing
        if main:
            last = max(main, key=lambda i: ops[i].start)
            spent[parts[last]] += length
            uncertain += length * (last in guessed)
        else:
            spent["exposed wait" if active else "idle"] += length
        if fetching:
            moving += length
            hidden += length * bool(other)
    scale = 1e-6 / steps
    total = changes[-1] - changes[0]
    durations: dict[str, float] = collections.defaultdict(float)
    for op in ops:
        durations[re.sub(r"[._]?\d+", "", op.name)] += op.end - op.start
    longest = sorted(durations, key=lambda name: -durations[name])[:SHOWN]
    return {
        "steps": steps,
        "step_ms": total * scale,
        "parts_ms": {part: spent[part] * scale for part in PARTS},
        "operations_ms": {name: durations[name] * scale for name in longest},
        "transfer_ms": moving * scale,
        "hidden_share": hidden / moving if moving else None,
        "guessed_share": uncertain / total,
    }


def _parts(ops: Sequence[Op]) -> tuple[list[str], set[int]]:
    """Return the part of every operation, and the operations whose part was guessed."""
    parts: list[str] = []
    guessed: set[int] = set()
    before: dict[str, str] = {}
    for i, op in enumerate(ops):
        kernel = next((part for name, part in KERNELS.items() if op.name.startswith(name)), None)
        if kernel or op.path or op.copy:
            scopes = [SCOPES[name] for name in op.path.split("/") if name in SCOPES]
            parts.append(kernel or (scopes or ["other"])[-1])  # of the innermost scope
            if not op.copy:
                before[op.line] = parts[i]
        else:
            parts.append(before.get(op.line, "other"))
            guessed.add(i)
    return parts, guessed


def _on_other_line(ops: Sequence[Op], work: list[int], fetching: list[int]) -> bool:
    """Return whether work runs concurrently with the transfer, not as a part of it."""
    lines = {ops[i].line for i in fetching if not ops[i].copy}
    return not lines or any(ops[i].line not in lines for i in work)


def read(folder: Path) -> list[Op]:
    """Return all operations of the trace in a folder, in order of their start."""
    data = next(folder.rglob("*.xplane.pb")).read_bytes()
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
        stats, end = dict(event.stats), event.start_ns + event.duration_ns
        name = stats.get("hlo_op")
        if name is None and event.name.startswith("end: "):
            # On the CPU an operation may leave work to other threads; this event marks the end.
            begun = waiting.pop(stats.get("_c"), None)
            if begun is not None:
                ops[begun] = ops[begun]._replace(end=max(ops[begun].end, event.start_ns))
            continue
        if name is None and not on_gpu:
            continue
        program = f"{stats.get('hlo_module')}({stats.get('program_id')})"
        path = programs.get(program, {}).get(name, "")
        if on_gpu and not path:  # a kernel of a CUDA graph, whose instruction is the whole graph
            path = by_kernel.get(kernel_name(event.name), "")
        kind = event.name.lower() if on_gpu else ""
        if "memcpyd2h" in kind:
            continue  # tokens, or rows of a flush: a step does not wait for them
        waiting[stats.get("_p")] = len(ops)
        shown = event.name if on_gpu else str(name)
        ops.append(Op(line_name, shown, path, event.start_ns, end, "memcpyh2d" in kind))
    return ops


def kernel_name(name: str) -> str:
    """Convert an HLO instruction's name to XLA's name of its kernel."""
    return re.sub(r"[^0-9a-zA-Z_]", "_", name)


def source_paths(data: bytes) -> dict[str, dict[str, str]]:
    """Return the source path of each instruction, by compiled program "name(id)" of a trace."""
    programs = {}
    for plane in map(_message, _message(memoryview(data))[1]):
        for entry in map(_message, plane[4] if plane[2] == [b"/host:metadata"] else ()):
            for metadata in map(_message, entry[2]):
                for stat in map(_message, metadata[5]):
                    for proto in map(_message, stat[6]):
                        programs[_text(metadata[2])] = _module_paths(proto[1])
    return programs


def _module_paths(modules: Iterable[memoryview]) -> dict[str, str]:
    """Return paths by instruction name; a missing one is the most common of the nearest ones."""
    names: dict[int, str] = {}
    paths: dict[int, str] = {}
    operands: dict[int, list[int]] = {}
    called: dict[int, list[int]] = {}
    members: dict[int, list[int]] = collections.defaultdict(list)
    for computation in (_message(c) for module in modules for c in _message(module)[3]):
        for instruction in map(_message, computation[2]):
            identity = _number(instruction[35])
            names[identity] = _text(instruction[1])
            paths[identity] = "".join(_text(_message(source)[2]) for source in instruction[7])
            operands[identity], called[identity] = map(_packed, (instruction[36], instruction[38]))
            members[_number(computation[5])].append(identity)
    inside = {
        i: [j for c in computations for j in members[c]] for i, computations in called.items()
    }
    for related in (inside, _inverse(inside), _inverse(operands), operands):  # callers, users
        changed = True
        while changed:
            changed = False
            for i in [i for i, path in paths.items() if not path]:
                if known := [paths[j] for j in related.get(i, ()) if paths.get(j)]:
                    paths[i] = collections.Counter(known).most_common(1)[0][0]
                    changed = True
    return {name: paths[i] for i, name in names.items()}


def _inverse(related: dict[int, list[int]]) -> dict[int, list[int]]:
    inverse: dict[int, list[int]] = collections.defaultdict(list)
    for i, others in related.items():
        for j in others:
            inverse[j].append(i)
    return inverse


def _message(buffer: memoryview) -> dict[int, list[Any]]:
    """Return the values of an encoded message's fields: numbers, or bytes of longer values."""
    fields: dict[int, list[Any]] = collections.defaultdict(list)
    at = 0
    while at < len(buffer):
        tag, at = _varint(buffer, at)
        kind = tag & 7
        if kind in (0, 2):  # a number, or the size of longer values
            value, at = _varint(buffer, at)
        else:
            value = {1: 8, 5: 4}[kind]
        if kind:
            value, at = buffer[at : at + value], at + value
        fields[tag >> 3].append(value)
    return fields


def _varint(buffer: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = buffer[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def _text(values: Iterable[memoryview]) -> str:
    return b"".join(values).decode()


def _number(values: Sequence[int]) -> int:
    return values[0] if values else 0


def _packed(values: Iterable[memoryview]) -> list[int]:
    """Return a repeated number."""
    numbers: list[int] = []
    for value in values:
        at = 0
        while at < len(value):
            number, at = _varint(value, at)
            numbers.append(number)
    return numbers
