"""What a calibration is worth at positions that its text does not reach.

    python -m benchmarks.calibration --model tiny-llama --text BOOK

The model is converted three times with the same tokens: in windows of all its positions; in short
windows, taken for what they are; and in short windows whose moments are spread over all positions
(`infinigen_jax.spread`), which is what a conversion does of a model with more positions than
calibration tokens. Then the attention mass that is found in windows of the text, beside the
oracle's. The same command goes on where it was stopped.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks import machine
from benchmarks.files import RESULTS, note, write_json
from infinigen_jax.checkpoint import load, model_folder
from infinigen_jax.convert import calibrate, convert, pipeline
from infinigen_jax.engine import Engine
from infinigen_jax.evaluation.recall import study_windows, summary
from infinigen_jax.evaluation.texts import read_text
from infinigen_jax.policies import InfiniGen, InfiniGenPaper

WAYS = ("all positions", "first positions", "first positions, spread")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.calibration", description="Compare calibrations by recall."
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="a model folder with rotary positions")
    add("--text", type=Path, required=True, help="UTF-8 text to measure on")
    add("--seen", type=int, default=256, help="positions of the short windows (default 256)")
    add("--context", type=int, default=768, help="tokens before those measured (default 768)")
    add("--windows", type=int, default=8, help="of the text (default 8)")
    add("--budget", type=float, default=0.05)
    add("--cap-seconds", type=float, help="start nothing new after so long")
    add("--json", type=Path, default=RESULTS / "calibration-spread.json", help="result file")
    return parser


def main(argv: list[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    deadline = time.monotonic() + (options.cap_seconds or math.inf)
    settings = {
        "benchmark": "calibration",
        "model": options.model.name,
        "text": options.text.name,
        "seen": options.seen,
        "context": options.context,
        "windows": options.windows,
        "budget": options.budget,
    }
    result: dict[str, Any] = settings | {"machine": machine.describe(), "lines": []}
    result["lines"] = finished(options.json, result)
    for way in WAYS:
        if time.monotonic() > deadline or way in {line["calibration"] for line in result["lines"]}:
            continue
        with tempfile.TemporaryDirectory() as folder:
            with calibrating(way, options.seen):
                source = model_folder(str(options.model))
                model = load(convert(source, Path(folder) / "converted"), "float32")
            for name, policy in policies(options.budget).items():
                known = {"calibration": way, "policy": name}
                result["lines"].append(known | found(model, policy, options))
        write_json(options.json, result)
        note(f"{way}: done")
    print(table(result))
    return 0


def finished(path: Path, result: dict[str, Any]) -> list[dict[str, Any]]:
    """What an interrupted run with the same settings has measured, of the same code."""
    if not path.exists():
        return []

    def known(run: dict[str, Any]) -> dict[str, Any]:
        rest = {name: run[name] for name in run if name not in ("machine", "lines")}
        return rest | {"commit": run["machine"]["commit"]}

    before = json.loads(path.read_text())
    return before["lines"] if known(before) == known(result) else []


def policies(budget: float) -> dict[str, InfiniGen]:
    """The defaults, by either query; with a quarter of the columns; and the paper's form with so
    many."""
    return {
        "own query": InfiniGen(budget=budget, query="own"),
        "corrected query": InfiniGen(budget=budget, query="corrected"),
        "quarter": InfiniGen(budget=budget, query="own", partial_ratio=0.25),
        "paper, quarter": InfiniGenPaper(budget=budget, partial_ratio=0.25),
    }


@contextlib.contextmanager
def calibrating(way: str, seen: int) -> Iterator[None]:
    """Conversions within are calibrated this way."""
    whole = calibrate.windows

    def short(ids: Any, config: Any, *rest: Any) -> Any:
        return whole(ids, dataclasses.replace(config, max_positions=seen), *rest)

    with contextlib.ExitStack() as stack:
        if way != WAYS[0]:
            for module in (calibrate, pipeline):
                stack.enter_context(mock.patch.object(module, "windows", short))
        if way == WAYS[1]:
            stack.enter_context(mock.patch.object(calibrate, "offsets", lambda *_: 1))
        yield


def found(model: Any, policy: InfiniGen, options: argparse.Namespace) -> dict[str, float]:
    """What a policy finds of the attention."""
    length = model.config.max_positions
    text = read_text(str(options.text)).content[: 8 * length * options.windows]
    ids = np.asarray(model.tokenizer.encode(text), np.int32)[: length * options.windows]
    windows = ids.reshape(options.windows, length)
    settings = {
        "window": length,
        "context": options.context,
        "chunk": length - options.context,
        "batch": options.windows,
        "states": "own",
    }
    arrays, _ = study_windows(Engine(model, policy=policy), windows, settings)
    means = summary(arrays, settings)
    names = ("top_k_recall", "mass", "oracle_mass", "of_oracle", "error", "oracle_error")
    return {name: means[name] for name in names}


def table(result: dict[str, Any]) -> str:
    """Markdown."""
    lines = ["| calibration | policy | top-k recall | mass | of oracle | error |"]
    lines.append("|---|---|---|---|---|---|")
    for entry in result["lines"]:
        numbers = [f"{100 * entry[n]:.1f}" for n in ("top_k_recall", "mass", "of_oracle")]
        cells = [entry["calibration"], entry["policy"], *numbers, f"{entry['error']:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
