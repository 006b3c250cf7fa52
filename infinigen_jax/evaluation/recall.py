"""Share of the true attention that each policy covers, by layer and position.

Like `perplexity` it runs decode steps over windows of a text. In each step it also computes
attention over the whole cache from the step's queries and rows:

 - top-k recall: share of the k rows with the highest true scores that the policy selected, k being
   the budget (a policy that selects fewer rows cannot reach 100 %);
 - mass: share of the softmax over the past tokens that was attended, fetched or resident; also for
   the oracle, with the same resident rows and budget, and the ratio of the two;
 - error: relative L2 error of a layer's attention output, after the output projection; also for
   the oracle.

Means are over layers that select rows; a policy that selects in none attends to all rows.
"""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from infinigen_jax.errors import ParameterError
from infinigen_jax.evaluation.report import mean_and_error, percent
from infinigen_jax.evaluation.session import Measurement, Session, add_common_options
from infinigen_jax.evaluation.texts import add_window_options, load_windows

if TYPE_CHECKING:
    from infinigen_jax.engine.engine import Engine
    from infinigen_jax.evaluation.scoring import Traffic

SUMMARY = "attention mass, top-k rows and attention output, against exact top-k"
READ_EVERY = 16  # steps between reads; few, because a step's records are large
MEANS = ("mass", "oracle_mass", "error", "oracle_error")
COUNTS = ("wanted", "hits")
HEAD = ["top-k recall", "mass", "oracle's", "of oracle", "error", "oracle's", "lost most in"]


def add_options(parser: argparse.ArgumentParser) -> None:
    add_window_options(parser)
    add_common_options(parser, batch=4, of="windows")


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> None:
    session = Session(arguments, say)
    if any(configuration.pool is not None for configuration in session.chosen):
        raise ParameterError("pool", "recall looks for rows by their position; leave it out")
    model, windows, settings, total = load_windows(session)

    def study(engine: "Engine", advance: Callable[[int], object]) -> Measurement:
        arrays, traffic = study_windows(engine, windows, settings, advance)
        return Measurement(arrays, traffic.per_token())

    measured = session.measure(model, study, total, "tokens")
    lines = [line.values | summary(line.arrays, settings) for line in measured]
    session.finish(lines, HEAD, cells)


def study_windows(
    engine: "Engine",
    windows: np.ndarray,
    settings: dict[str, Any],
    advance: Callable[[int], object] = lambda tokens: None,
) -> tuple[dict[str, np.ndarray], "Traffic"]:
    """Study the steps over all tokens after the context of some windows.

    Returns:
        Means of MEANS and sums of COUNTS for each window and chunk, [w, l, heads, chunks] float64,
        with heads 1 for errors of a whole layer; `layers` [l], the layers in which the policy
        selects rows; and the traffic.
    """
    from infinigen_jax.evaluation.scoring import (
        Traffic,
        batches,
        check_finite,
        start_windows,
        traffic,
    )
    from infinigen_jax.evaluation.study import watch

    parts, total = [], Traffic()
    layers = [engine.decoder.on_host[number] for number in engine.decoder.selecting]
    positions = range(settings["context"] - 1, windows.shape[1] - 1)
    chunks = np.arange(len(positions)) // settings["chunk"]  # of the steps
    steps = np.bincount(chunks)
    for rows, kept in batches(len(windows), settings["batch"]):
        batch, sums = windows[rows], {}
        run = start_windows(engine, batch, settings["context"])
        for first in range(0, len(positions), READ_EVERY):
            watched = []
            for position in positions[first : first + READ_EVERY]:
                log_probs, records = run.watch(watch, batch[:, position])
                watched.append(records)
            for chunk, records in zip(chunks[first:], watched, strict=False):
                for name in (*MEANS, *COUNTS):
                    value = _stacked(name, [records[i] for i in layers], len(batch))
                    shape = (*value.shape, len(steps))
                    sums.setdefault(name, np.zeros(shape))[..., chunk] += value
            check_finite(engine, np.asarray(log_probs).max(axis=1))
            advance(kept * len(watched))
        parts.append({n: (x if n in COUNTS else x / steps)[:kept] for n, x in sums.items()})
        total += traffic(run, kept)
        del run  # the next batch needs its memory
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in (*MEANS, *COUNTS)}
    check_finite(engine, *arrays.values())
    return arrays | {"layers": np.array(layers, np.int32)}, total


def _stacked(field: str, seen: list[Any], batch: int) -> np.ndarray:
    """Return a field of one step's records as [b, layers, heads], float64."""
    if not seen:
        return np.zeros((batch, 0, 1))
    values = [np.asarray(layer[field], np.float64) for layer in seen]
    return np.stack([value.reshape(batch, -1) for value in values], axis=1)


def summary(arrays: dict[str, np.ndarray], settings: dict[str, Any]) -> dict[str, Any]:
    """Return means over everything, by layer, and by chunk."""
    context, chunk = settings["context"], settings["chunk"]
    total = settings["window"] - context
    starts = range(0, total, chunk)
    tokens = np.array([min(chunk, total - start) for start in starts], np.float64)
    layers = [
        {"layer": layer} | _part(arrays, tokens, np.s_[:, i : i + 1])
        for i, layer in enumerate(arrays["layers"].tolist())
    ]
    chunks = [
        {"from": context + start, "to": context + min(start + chunk, total)}
        | _part(arrays, tokens[j : j + 1], np.s_[..., j : j + 1])
        for j, start in enumerate(starts)
    ]
    return _part(arrays, tokens) | {"layers": layers, "chunks": chunks}


def _part(arrays: dict[str, np.ndarray], tokens: np.ndarray, at: Any = ...) -> dict[str, Any]:
    """Return means of a part `at` over windows, layers, heads and chunks; ratios are of means."""
    if not arrays["mass"].shape[1]:  # no layer selects rows: everything is attended
        all_of_it = dict.fromkeys(("top_k_recall", "mass", "oracle_mass", "of_oracle"), 1.0)
        return all_of_it | {"mass_standard_error": None, "error": 0.0, "oracle_error": 0.0}
    weights = tokens / tokens.sum()

    def per_window(name: str) -> np.ndarray:
        return (arrays[name][at] @ weights).mean(axis=(1, 2))

    mass, deviation = mean_and_error(per_window("mass"))
    best = float(per_window("oracle_mass").mean())
    wanted, hits = (float(arrays[name][at].sum()) for name in COUNTS)
    return {
        "top_k_recall": hits / wanted if wanted else 1.0,
        "mass": mass,
        "mass_standard_error": deviation,
        "oracle_mass": best,
        "of_oracle": mass / best if best else 1.0,
        "error": float(per_window("error").mean()),
        "oracle_error": float(per_window("oracle_error").mean()),
    }


def cells(line: dict[str, Any]) -> list[str]:
    """Return a line's cells of the columns HEAD."""
    shares = ("top_k_recall", "mass", "oracle_mass", "of_oracle")
    return [
        *(percent(line[name], 1) for name in shares),
        *(f"{line[name]:.4f}" for name in ("error", "oracle_error")),
        lost_most(line),
    ]


def lost_most(line: dict[str, Any]) -> str:
    """Return the layer with the lowest share of the oracle's mass."""
    if not line["layers"]:
        return ""
    worst = min(line["layers"], key=lambda layer: layer["of_oracle"])
    return f"layer {worst['layer']}: {percent(worst['of_oracle'], 1)}"
