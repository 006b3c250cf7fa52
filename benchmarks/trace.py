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
its part. A kernel without a scope counts to the part of its neighbours.
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
    kernels = [next((k for k in KERNELS if op.name.startswith(k)), "") for op in ops]
    parts = [KERNELS.get(k) or _part(op.path) for k, op in zip(kernels, ops, strict=True)]
    named = [op.path or op.copy or k for k, op in zip(kernels, ops, strict=True)]
    guessed = {i for i, known in enumerate(named) if not known}
    before: dict[str, str] = {}
    for i, op in enumerate(ops):
        if i in guessed:
            parts[i] = before.get(op.line, "other")
        elif not op.copy:
            before[op.line] = parts[i]
    return parts, guessed


def _part(path: str) -> str:
    """Return the part of the innermost scope of a path that has one."""
    names = [SCOPES[name] for name in path.split("/") if name in SCOPES]
    return names[-1] if names else "other"


def _on_other_line(ops: Sequence[Op], work: list[int], fetching: list[int]) -> bool:
    """Return whether work runs concurrently with the transfer, not as a part of it."""
    lines = {ops[i].line for i in fetching if not ops[i].copy}
    return not lines or any(ops[i].line not in lines for i in work)
