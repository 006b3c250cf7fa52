"""Where the time of a decode step goes, from a profiler's trace of a few steps.

Every instant between the first and the last operation of the trace belongs to one part, so parts
add up to the step:

    speculation, selection, transfer, attention, mlp, sampling, other
                    what computes at that instant (the operation that started last)
    exposed wait    nothing computes, but rows are on their way
    idle            nothing runs at all: the device waits to be told

`transfer` is time in which the compute stream itself moves rows: on the CPU all of it, on a GPU
XLA's gather. Beside the parts: how long transfers ran in all, and the share of that in which
something else computed (hidden).

Parts are found by the scopes that the step is traced under (`jax.named_scope`), which XLA keeps
with every instruction. A kernel without one counts to its neighbours' part.
"""

import collections
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.xplane import Op, read

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
GATHER_KERNEL = "gather_rows"  # of the cuda transfer; launched on a stream that XLA does not know


def breakdown(run: Callable[[], Any], steps: int) -> dict[str, Any]:
    """Trace `run`, which does `steps` steps and waits for them; what it spent its time on.

    Returns:
        See `account`; milliseconds per step.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # it slows down what it traces
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        return account(read(Path(folder)), steps)


def account(ops: Sequence[Op], steps: int) -> dict[str, Any]:
    """Divide the time from the first to the last operation among the parts.

    Returns:
        step_ms; parts_ms, by part, which add up to it; layers_ms, the same time by layer ("" for
        what is outside of them); transfer_ms, in which rows were on their way; hidden_share of
        that; guessed_share of the step, in which the part was taken from neighbours.
    """
    if not ops:
        raise ValueError("the trace shows no operations")
    parts, guessed = _parts(ops)
    apart = [op.copy or op.name.startswith(GATHER_KERNEL) for op in ops]  # not in line with work
    changes = sorted({time for op in ops for time in (op.start, op.end)})
    spent: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    layers: dict[str, float] = collections.defaultdict(float)
    moving = hidden = uncertain = 0.0
    begun, active = 0, []
    for now, then in zip(changes, changes[1:], strict=False):
        active = [i for i in active if ops[i].end > now]
        while begun < len(ops) and ops[begun].start <= now:
            if ops[begun].end > now:
                active.append(begun)
            begun += 1
        length = then - now
        computing = [i for i in active if not apart[i] and parts[i] != "exposed wait"]
        # Rows move in a copy and in what is traced as a fetch. Work behind it in the list of active
        # operations started later: inside of it (a loop's body), or beside it.
        fetching = [i for i in active if ops[i].copy or parts[i] == "transfer"]
        other = [i for i in computing if parts[i] != "transfer"]
        main = other if other and _on_other_line(ops, other, fetching) else computing
        if main:
            last = max(main, key=lambda i: ops[i].start)
            spent[parts[last]] += length
            layers[_layer(ops[last])] += length
            uncertain += length * (last in guessed)
        else:
            spent["exposed wait" if active else "idle"] += length
            layers[_layer(ops[active[-1]]) if active else ""] += length
        if fetching:
            moving += length
            hidden += length * bool(other)
    scale = 1e-6 / steps
    total = changes[-1] - changes[0]
    return {
        "steps": steps,
        "step_ms": total * scale,
        "parts_ms": {part: spent[part] * scale for part in PARTS},
        "layers_ms": {name: layers[name] * scale for name in sorted(layers, key=_order)},
        "transfer_ms": moving * scale,
        "hidden_share": hidden / moving if moving else None,
        "guessed_share": uncertain / total,
    }


def _parts(ops: Sequence[Op]) -> tuple[list[str], set[int]]:
    """The part of every operation, and which of them were guessed from their neighbours."""
    parts = ["transfer" if op.name.startswith(GATHER_KERNEL) else _part(op.path) for op in ops]
    named = [op.path or op.copy or op.name.startswith(GATHER_KERNEL) for op in ops]
    guessed = {i for i, known in enumerate(named) if not known}
    before: dict[str, str] = {}
    for i, op in enumerate(ops):
        if i in guessed:
            parts[i] = before.get(op.line, "other")
        elif not op.copy:
            before[op.line] = parts[i]
    return parts, guessed


def _part(path: str) -> str:
    """The innermost scope of a path that has a part."""
    names = [SCOPES[name] for name in path.split("/") if name in SCOPES]
    return names[-1] if names else "other"


def _layer(op: Op) -> str:
    found = re.search(r"(?:^|/)(layer\d+)(?:/|$)", op.path)
    return found.group(1) if found else ""


def _order(name: str) -> int:
    return int(name.removeprefix("layer") or -1)


def _on_other_line(ops: Sequence[Op], work: list[int], fetching: list[int]) -> bool:
    """Whether work runs beside the transfer, and not as a part of it."""
    lines = {ops[i].line for i in fetching if not ops[i].copy}
    return not lines or any(ops[i].line not in lines for i in work)
