"""Perplexity of a text for several policies and budgets, compared with the full cache.

The text is cut into windows. In each, the first tokens are context and the others are scored by the
decode steps that generate text. All configurations score the same tokens, so the difference from
the full cache is paired, and its standard error is much smaller than that of either.

The difference may have either sign and may be near zero even for a wrong policy. Two further
measures compare the predictions themselves with the full cache's: their divergence, and how often
the most likely token is the same.
"""

import argparse
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from infinigen_jax.evaluation.report import mean_and_error, percent, with_error
from infinigen_jax.evaluation.session import Measurement, Session, add_common_options
from infinigen_jax.evaluation.texts import add_window_options, load_windows

if TYPE_CHECKING:
    from infinigen_jax.engine.engine import Engine

SUMMARY = "perplexity of a text, whole and by position"
HEAD = ["perplexity", "nats/token", "Δ nats", "Δ perplexity", "KL, nats", "same best"]
# Number of the full cache's most likely tokens that the divergence distinguishes: 1 KiB per token.
# At perplexity 25 they hold nine tenths of the probability.
LIKELIEST = 128


def add_options(parser: argparse.ArgumentParser) -> None:
    add_window_options(parser)
    add_common_options(parser, batch=4, of="windows")


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> None:
    session = Session(arguments, say)
    session.finish(measured_lines(session), HEAD, cells)


def measured_lines(session: Session) -> list[dict[str, Any]]:
    """Return the result's lines for all configurations of a session."""
    model, windows, settings, total = load_windows(session)
    if not session.arguments.no_reference:
        settings["likeliest"] = min(LIKELIEST, model.config.vocab_size)
    scoring = Scoring(windows, settings)
    return lines_of(session.measure(model, scoring, total, "tokens"), scoring)


class Scoring:
    """Measurement of one engine after another, each compared with the first, the `reference`.

    `settings` are context, chunk and batch, and `likeliest` if there is something to compare with.
    """

    def __init__(self, windows: np.ndarray, settings: dict[str, int]):
        self.windows = windows
        self.settings = settings
        self.reference: dict[str, np.ndarray] | None = None

    def __call__(self, engine: "Engine", advance: Callable[[int], object]) -> Measurement:
        from infinigen_jax.evaluation.scoring import score_windows

        context, batch, reference = self.settings["context"], self.settings["batch"], self.reference
        asked = self.settings.get("likeliest", 0) if reference is None else reference["likeliest"]
        scores, traffic = score_windows(engine, self.windows, context, batch, advance, asked)
        arrays = {"nats": scores.nats}
        if reference is not None:
            pairs = zip(reference["log_probs"], scores.log_probs, strict=True)
            same = scores.best == reference["likeliest"][..., 0]
            # One window at a time, to bound the temporaries in float64.
            arrays["divergence"] = np.stack([divergence(p, q) for p, q in pairs])
            arrays["same"] = same.astype(np.float64)
        elif asked:
            arrays |= {"likeliest": scores.tokens, "log_probs": scores.log_probs}
        return Measurement(arrays, traffic.per_token())


def lines_of(measured: Iterable[Measurement], scoring: Scoring) -> list[dict[str, Any]]:
    """Return the result's lines; a line is measured after those before it are complete."""
    lines = []
    context, chunk = scoring.settings["context"], scoring.settings["chunk"]
    for line in measured:
        arrays = {"nats": line.arrays["nats"]}
        if (reference := scoring.reference) is not None:
            arrays = line.arrays | {"change": arrays["nats"] - reference["nats"]}
        lines.append(line.values | statistics(arrays, context, chunk))
        if line.values["reference"]:
            scoring.reference = line.arrays
    return lines


def statistics(arrays: Mapping[str, np.ndarray], context: int, chunk: int) -> dict[str, Any]:
    """Return perplexity, whole and by position from `context`, and its change from a reference.

    Args:
        arrays: `nats` [w, t]. If compared with a reference, also their `change`, the `divergence`,
            and `same`, 1 for an equal best token, else 0.
    """

    def part(start: int, end: int) -> dict[str, Any]:
        return _mean({name: x[:, start:end] for name, x in arrays.items()})

    nats = arrays["nats"]
    total = nats.shape[1]
    ends = [(start, min(start + chunk, total)) for start in range(0, total, chunk)]
    chunks = [{"from": context + a, "to": context + b} | part(a, b) for a, b in ends]
    # Makes any two lines of a result comparable window by window.
    windows = [round(float(mean), 7) for mean in nats.mean(axis=1)]
    return part(0, total) | {"chunks": chunks, "window_nats": windows}


def _mean(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return means over all tokens, with errors over windows, whose tokens are dependent."""

    def mean_of(name: str) -> tuple[float | None, float | None]:
        if name not in arrays:
            return None, None
        numbers = arrays[name]
        return float(numbers.mean()), mean_and_error(numbers.mean(axis=1))[1]

    mean, error = mean_of("nats")
    change, change_error = mean_of("change")
    apart, apart_error = mean_of("divergence")
    ratio = _exp(change)
    return {
        "tokens": arrays["nats"].size,
        "nats_per_token": mean,
        "standard_error": error,
        "perplexity": _exp(mean),
        "difference_nats": change,
        "difference_standard_error": change_error,
        "perplexity_change_percent": None if ratio is None else 100 * (ratio - 1),
        "divergence_nats": apart,
        "divergence_standard_error": apart_error,
        "same_best_fraction": mean_of("same")[0],
    }


def _exp(nats: float | None) -> float | None:
    """Return exp(nats); None without nats, or if it overflows, because JSON has no infinity."""
    return math.exp(nats) if nats is not None and nats < 700 else None


def divergence(
    reference: Float[np.ndarray, "*w t n"], other: Float[np.ndarray, "*w t n"]
) -> Float[np.ndarray, "*w t"]:
    """Return the Kullback-Leibler divergence from a reference to another distribution, in nats.

    The sum is over n tokens and one token that stands for all others. It is at most the divergence
    over all tokens, and close to it if the reference considers the n tokens likely. The result is
    float64 and at least 0.
    """
    p, q = (np.exp(x.astype(np.float64)) for x in (reference, other))
    log_ratio = reference.astype(np.float64) - other
    # p log(p / q) + (q - p) is not negative; the second term sums to zero over all tokens.
    known = np.sum(p * log_ratio + (q - p), axis=-1)
    # Bound the remaining probability by the rounding of float32 sums.
    p, q = (np.maximum(1 - x.sum(axis=-1), 1e-6) for x in (p, q))
    return np.maximum(known + p * np.log(p / q) + (q - p), 0)


def cells(line: dict[str, Any]) -> list[str]:
    """Return a line's cells in the columns of HEAD."""
    value, change = line["perplexity"], line["perplexity_change_percent"]
    same = line["same_best_fraction"]
    return [
        "" if value is None else f"{value:.4f}",
        with_error(line["nats_per_token"], line["standard_error"]),
        with_error(line["difference_nats"], line["difference_standard_error"], 5),
        "" if change is None else f"{change:+.3f} %",
        with_error(line["divergence_nats"], line["divergence_standard_error"], 5),
        "" if same is None else percent(same, 1),
    ]
