"""Accuracy on tasks of lm-evaluation-harness, computed by the engine that generates.

Tasks have the harness's names. `--include-path DIR` adds a folder of task files (YAML and the data
they name), which needs no network.
"""

import argparse
import contextlib
import functools
import importlib.util
import io
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from infinigen_jax.engine.engine import Engine
from infinigen_jax.errors import InputError
from infinigen_jax.evaluation.report import percent
from infinigen_jax.evaluation.session import Measurement, Session
from infinigen_jax.numeric import whole_number

OFFLINE = ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE")  # make the harness read local files


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tasks", nargs="+", metavar="NAME", help="tasks of lm-eval, instead of --text")
    add("--include-path", metavar="DIR", help="folder of additional task files; needs no network")
    shots = "examples in the prompt (default: the task's)"
    add("--shots", type=whole_number(0), metavar="K", help=shots)
    add("--limit", type=whole_number(1), metavar="N", help="items of a task (default: all)")


def measured_lines(session: Session) -> list[dict[str, Any]]:
    given = session.arguments
    if importlib.util.find_spec("lm_eval") is None:
        raise InputError("--tasks: lm-eval is not installed; pip install '.[eval]'")
    if given.quiet:
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if given.include_path is not None:
        os.environ |= {name: "1" for name in OFFLINE if name not in os.environ}
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    manager = TaskManager(include_path=given.include_path)
    if unknown := sorted(set(given.tasks) - set(manager.all_tasks)):
        raise InputError(f"--tasks {unknown[0]}: unknown to lm-eval; give --include-path")
    model = session.load()
    names = ("tasks", "shots", "limit", "batch")
    session.record["settings"] = {name: getattr(given, name) for name in names}
    measure = functools.partial(_measure, given, manager)
    measured = session.measure(model, measure, len(given.tasks), "tasks")
    return [line.values for line in measured]


def _measure(
    given: argparse.Namespace, manager: Any, engine: Engine, advance: Callable[[int], object]
) -> Measurement:
    """Return the accuracy of one engine by task, and the mean."""
    from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports]

    from infinigen_jax.evaluation.lm_eval import InfiniGenLM

    model: Any = InfiniGenLM(engine, batch_size=given.batch, quiet=given.quiet)
    parts = []
    for name in given.tasks:
        with contextlib.redirect_stderr(io.StringIO() if given.quiet else sys.stderr):
            result: Any = simple_evaluate(
                model=model,
                tasks=[name],
                num_fewshot=given.shots,
                limit=given.limit,
                task_manager=manager,
                bootstrap_iters=0,
                log_samples=False,
            )
        scores = result["results"][name]
        if "acc,none" not in scores:
            raise InputError(f"--tasks {name}: it does not report accuracy")
        parts.append({"task": name, "accuracy": scores["acc,none"]})
        advance(1)
    mean = float(np.mean([part["accuracy"] for part in parts]))
    return Measurement({}, {"accuracy": mean, "tasks": parts} | model.traffic.per_token())


def quality(lines: list[dict[str, Any]]) -> tuple[list[str], Callable[[dict[str, Any]], list[str]]]:
    """Return the headings of the quality columns, and a function that makes a line's cells."""
    head = [*(part["task"] for part in lines[0]["tasks"]), "mean"]
    return head, lambda line: [percent(x["accuracy"], 1) for x in (*line["tasks"], line)]
