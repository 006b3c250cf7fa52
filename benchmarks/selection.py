"""Time of choosing rows from speculated scores, by length of context and number of rows.

    python -m benchmarks.selection
    python -m benchmarks.selection --contexts 16384 65536 262144 --shares 0.01 0.05 --heads 64

`top_slots` is what the package calls where no kernel selects; beside it a search for the threshold
with a compaction, linear in the context, and `lax.top_k`, of which it may be one; and on a GPU the
kernel. The growth is the time at the longest context over that at the shortest, over the ratio of
their lengths: 1 where it is linear.
"""

import argparse
import math
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
from infinigen_jax import cuda
from infinigen_jax.compaction import compact
from infinigen_jax.cuda.calls import select_rows
from infinigen_jax.selection import budget_fraction, top_slots
from infinigen_jax.threshold import top_mask

# Given ranks [1, heads, context], how many to choose of each row, and that as a share.
Share = tuple[int, int]
Choose = Callable[[jax.Array, jax.Array, int, Share], jax.Array]
WAYS: dict[str, Choose] = {
    "top_slots": lambda rank, count, size, _: top_slots(rank, count, size),
    "threshold": lambda rank, count, size, _: compact(top_mask(rank, count), size),
    "top_k": lambda rank, _, size, __: lax.top_k(rank, size)[1],
}


def by_kernel(rank: jax.Array, _: jax.Array, size: int, share: Share) -> jax.Array:
    """All tokens but the current one are on the host, and none is too unlikely."""
    positions = jnp.full(rank.shape[:1], rank.shape[2], jnp.int32)
    return select_rows(rank[:, :, None], positions, size, math.inf, share, sinks=0, window=1)[0]


def ways() -> dict[str, Choose]:
    """Those that there are on this device."""
    return WAYS | ({"kernel": by_kernel} if cuda.in_use() else {})


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
        "growth": {},
    }
    for context in sorted(options.contexts):
        for share in options.shares:
            if time.monotonic() < deadline:
                rows = budget_fraction(share).as_integer_ratio()
                if not (size := context * rows[0] // rows[1]):
                    size, rows = 1, (1, context)
                entry = {"context": context, "share": share, "rows": size}
                result["times"].append(entry | times(context, size, rows, options))
                result["growth"] = growth(result["times"])
                write_json(path, result)
    return result


def times(context: int, size: int, share: Share, options: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of each way at one context, and whether they choose the same rows."""
    key = jax.random.key(context)
    rank = jax.random.normal(key, (options.calls, 1, options.heads, context), jnp.float32)
    count = jnp.full((1, options.heads), size, jnp.int32)
    microseconds, rounds, chosen = {}, {}, {}
    for name, choose in ways().items():
        run = _all_calls(choose, size, share)
        chosen[name] = jnp.sort(run(rank, count), axis=-1)
        rounds[name] = [_seconds(run, rank, count) for _ in range(options.repeats)]
        microseconds[name] = 1e6 * statistics.median(rounds[name]) / options.calls
    first, *others = chosen.values()
    if not all(jnp.array_equal(first, other) for other in others):
        raise AssertionError(f"the ways choose different rows at a context of {context}")
    return {"microseconds": microseconds, "round_seconds": rounds}


def _all_calls(
    choose: Choose, size: int, share: Share
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """One program with a call for each leading entry, as a step's layers are one program."""
    return jax.jit(lambda rank, count: lax.map(lambda one: choose(one, count, size, share), rank))


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
        for name in first["microseconds"]:
            longer = last["microseconds"][name] / first["microseconds"][name]
            found.setdefault(name, []).append(longer / (last["context"] / first["context"]))
    return {name: statistics.mean(values) for name, values in found.items()}


def table(result: dict[str, Any]) -> str:
    """In Markdown."""
    described, names = result["machine"], list(result["growth"])
    lines = [
        f"{result['heads']} heads, microseconds; {described['cpu']}, {described['device']}",
        "",
        f"| context | rows | {' | '.join(names)} |",
        "|" + "---|" * (2 + len(names)),
    ]
    for entry in result["times"]:
        cells = [f"{entry['microseconds'][name]:.0f}" for name in names]
        lines.append(f"| {entry['context']} | {entry['rows']} | {' | '.join(cells)} |")
    if result["times"]:
        cells = [f"{growth:.2f}" for growth in result["growth"].values()]
        lines.append(f"| growth | | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
