"""Time of choosing rows from speculated scores, by length of context and number of rows.

    python -m benchmarks.selection
    python -m benchmarks.selection --contexts 16384 65536 262144 --shares 0.01 0.05 --heads 64

`top_slots` is what the package calls; beside it a search for the threshold with a compaction,
linear in the context, and `lax.top_k`, of which it may be one. The growth is the time at the
longest context over that at the shortest, over the ratio of their lengths: 1 where it is linear.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import machine
from benchmarks.files import RESULTS, note, write_json
from infinigen_jax.compaction import compact
from infinigen_jax.selection import top_mask, top_slots

Choose = Callable[[jax.Array, jax.Array, int], jax.Array]
WAYS: dict[str, Choose] = {
    "top_slots": top_slots,
    "threshold": lambda rank, count, size: compact(top_mask(rank, count), size),
    "top_k": lambda rank, count, size: lax.top_k(rank, size)[1],
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.selection", description="Measure the selection of rows."
    )
    add = parser.add_argument
    add("--contexts", type=int, nargs="+", default=[4096, 16384, 65536], metavar="N")
    add("--shares", type=float, nargs="+", default=[0.01, 0.05], help="rows wanted, of the context")
    add("--heads", type=int, default=8, help="rows of scores: KV heads of all sequences")
    add("--repeats", type=int, default=5, help="timed; the median counts (default 5)")
    add("--calls", type=int, default=4, help="in a row in each, as a step's layers (default 4)")
    add("--cap-seconds", type=float, help="start nothing new after so long")
    add("--json", type=Path, help="result file")
    return parser


def main(argv: list[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    path = options.json or RESULTS / f"selection-{machine.device_name()}.json"
    result = measure(options, path)
    print(table(result))
    note(f"written to {path}")
    return 0


def measure(options: argparse.Namespace, path: Path) -> dict[str, Any]:
    """All contexts and shares; the file is written as far as it got."""
    deadline = float("inf")
    if options.cap_seconds is not None:
        deadline = time.monotonic() + options.cap_seconds
    result: dict[str, Any] = {
        "benchmark": "selection",
        "machine": machine.describe(),
        "heads": options.heads,
        "calls": options.calls,
        "times": [],
    }
    for context in sorted(options.contexts):
        for share in options.shares:
            if time.monotonic() < deadline:
                size = max(1, int(share * context))
                entry = {"context": context, "share": share, "rows": size}
                result["times"].append(entry | times(context, size, options))
                result["growth"] = growth(result["times"])
                write_json(path, result)
    return result


def times(context: int, size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of each way at one context, and whether they choose the same rows."""
    key = jax.random.key(context)
    rank = jax.random.normal(key, (options.calls, 1, options.heads, context), jnp.float32)
    count = jnp.full((1, options.heads), size, jnp.int32)
    microseconds, rounds, chosen = {}, {}, {}
    for name, choose in WAYS.items():
        run = _all_calls(choose, size)
        chosen[name] = jnp.sort(run(rank, count), axis=-1)
        rounds[name] = [_seconds(run, rank, count) for _ in range(options.repeats)]
        microseconds[name] = 1e6 * statistics.median(rounds[name]) / options.calls
    first, *others = chosen.values()
    if not all(jnp.array_equal(first, other) for other in others):
        raise AssertionError(f"the ways choose different rows at a context of {context}")
    return {"microseconds": microseconds, "round_seconds": rounds}


def _all_calls(choose: Choose, size: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """One program with a call for each leading entry, as a step's layers are one program."""
    return jax.jit(lambda rank, count: lax.map(lambda one: choose(one, count, size), rank))


def _seconds(run: Callable[..., jax.Array], *arguments: jax.Array) -> float:
    start = time.perf_counter()
    run(*arguments).block_until_ready()
    return time.perf_counter() - start


def growth(entries: list[dict[str, Any]]) -> dict[str, float]:
    """Time at the longest context over the shortest, over the ratio of lengths; by way."""
    found: dict[str, list[float]] = {}
    for share in {entry["share"] for entry in entries}:
        same = [entry for entry in entries if entry["share"] == share]
        first, last = same[0], same[-1]
        for name in WAYS:
            longer = last["microseconds"][name] / first["microseconds"][name]
            found.setdefault(name, []).append(longer / (last["context"] / first["context"]))
    return {name: statistics.mean(values) for name, values in found.items()}


def table(result: dict[str, Any]) -> str:
    """In Markdown."""
    described = result["machine"]
    lines = [
        f"{result['heads']} heads, microseconds; {described['cpu']}, {described['device']}",
        "",
        f"| context | rows | {' | '.join(WAYS)} |",
        "|" + "---|" * (2 + len(WAYS)),
    ]
    for entry in result["times"]:
        cells = [f"{entry['microseconds'][name]:.0f}" for name in WAYS]
        lines.append(f"| {entry['context']} | {entry['rows']} | {' | '.join(cells)} |")
    if result["times"]:
        cells = [f"{result['growth'][name]:.2f}" for name in WAYS]
        lines.append(f"| growth | | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
