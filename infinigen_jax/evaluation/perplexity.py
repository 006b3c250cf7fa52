"""Perplexity of a text for several policies and budgets, compared with the full cache.

The text is cut into windows. In each, the first tokens are context and the others are scored by the
decode steps that generate text. All configurations score the same tokens, so the difference from
the full cache is paired, and its standard error is much smaller than that of either.

The difference may have either sign and may be near zero even for a wrong policy. Two further
measures compare the predictions themselves with the full cache's: their divergence, and how often
the most likely token is the same.
"""

import argparse
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from infinigen_jax.evaluation.parts import Measurement
from infinigen_jax.evaluation.report import percent, with_error
from infinigen_jax.evaluation.session import Session, add_common_options, traffic_of
from infinigen_jax.evaluation.statistics import Compared, divergence, statistics
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
    session = Session.of(arguments, say)
    lines = measured_lines(session)
    session.finish(lines, HEAD, cells)


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
        return Measurement(arrays, traffic_of(traffic))

    def numbers(self, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        """Return the entries of the result file for one engine."""
        compared = None
        if self.reference is not None:
            compared = Compared(self.reference["nats"], arrays["divergence"], arrays["same"])
        return statistics(
            arrays["nats"], compared, self.settings["context"], self.settings["chunk"]
        )


def lines_of(measured: Iterable[Measurement], scoring: Scoring) -> list[dict[str, Any]]:
    """Return the result's lines; a line is measured after those before it are complete."""
    lines = []
    for line in measured:
        lines.append(line.values | scoring.numbers(line.arrays))
        if line.values["reference"]:
            scoring.reference = line.arrays
    return lines


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
