"""Scoring of windows with the engine: prefill a context, decode given tokens, score the next ones.

    window      0 ........ c-2   c-1   c  ........  n-2   n-1
    prefilled   x x x x x x x
    decoded                       x    x  x x x x x  x
    scored                             x  x x x x x  x     x

Every score comes from a decode step. The last token of the context is decoded too, because prefill
computes the same for every policy.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from infinigen_jax.engine.engine import Engine
from infinigen_jax.engine.generation import Run
from infinigen_jax.engine.results import Moved, moved_by, rows_per_step
from infinigen_jax.errors import InputError, MemoryShortageError, ParameterError

READ_EVERY = 64  # steps between reads, so that the device never waits for Python


class Scores(NamedTuple):
    """Predictions for the tokens of some windows after their context."""

    nats: Float[np.ndarray, "w t"]  # negative natural log-probability of each token
    best: Int[np.ndarray, "w t"]  # most likely token at each position
    tokens: Int[np.ndarray, "w t n"]  # at each position
    log_probs: Float[np.ndarray, "w t n"]  # their natural log-probabilities


@dataclasses.dataclass(frozen=True)
class Traffic(Moved):
    """Rows moved in the steps over the scored tokens of some windows.

    `attended` are rows selected or resident over past tokens, in layers that select rows, for each
    token; 1 without such layers.
    """

    attended: float = 0.0

    def per_token(self) -> dict[str, Any]:
        attended = self.attended / max(self.tokens, 1)
        return super().per_token() | {"attended_fraction": attended}


def score_windows(
    engine: Engine,
    windows: Int[np.ndarray, "w n"],
    context: int,
    batch: int,
    advance: Callable[[int], object] = lambda tokens: None,
    asked: int | Int[np.ndarray, "w t m"] = 0,
) -> tuple[Scores, Traffic]:
    """Score all tokens after the context of some windows.

    Args:
        context: c, tokens of a window that are not scored; at least 2.
        batch: batch size. The last batch repeats windows to fill up, so that one compilation
            serves all.
        asked: further tokens whose log-probabilities to return: a number of most likely ones at
            each position, or these m; t = n - c.

    Returns:
        The scores [w, n - c], nats in float64; and the traffic.
    """
    parts, total = [], Traffic()
    for rows, kept in batches(len(windows), batch):
        further = asked if isinstance(asked, int) else asked[rows]
        run = start_windows(engine, windows[rows], context)
        parts.append(score_run(run, windows[rows, context - 1 :], kept, further, advance))
        total += traffic(run, kept)
        del run  # the next batch needs its memory
    all_scores = Scores(*(np.concatenate(part) for part in zip(*parts, strict=True)))
    check_finite(engine, all_scores.nats)
    return all_scores, total


def check_finite(engine: Engine, *measured: Float[np.ndarray, "..."]) -> None:
    """Refuse numbers of an engine that are not all finite."""
    wrong = sum(np.count_nonzero(~np.isfinite(numbers)) for numbers in measured)
    if wrong:
        raise InputError(
            f"{wrong} of {sum(numbers.size for numbers in measured)} scores are not finite in "
            f"{engine.model.dtype.name}; try `dtype` float32, or check the model"
        )


def score_run(
    run: Run,
    tokens: Int[np.ndarray, "b n"],
    kept: int,
    asked: int | Int[np.ndarray, "b t m"] = 0,
    advance: Callable[[int], object] = lambda tokens: None,
) -> Scores:
    """Decode tokens after the prompts and score each next one, in the first `kept` sequences.

    Other arguments are those of `score_windows`; the other sequences fill the batch.
    """
    read, waiting = [], []
    for step in range(tokens.shape[1] - 1):
        log_probs, targets = run.predict(tokens[:, step]), tokens[:, step + 1]
        # Select the tokens on the device: log-probabilities are large, and steps are queued.
        others = _likeliest(log_probs, asked) if isinstance(asked, int) else asked[:, step]
        target_log_probs, other_log_probs = _chosen(log_probs, targets, others)
        waiting.append((target_log_probs, run.drawn, others, other_log_probs))
        if len(waiting) == 2 * READ_EVERY:
            read += jax.device_get(waiting[:READ_EVERY])
            del waiting[:READ_EVERY]
            advance(kept * READ_EVERY)
    read += jax.device_get(waiting)
    advance(kept * len(waiting))
    target_log_probs, *rest = (np.stack(part, axis=1)[:kept] for part in zip(*read, strict=True))
    return Scores(-target_log_probs.astype(np.float64), *rest)


@functools.partial(jax.jit, static_argnames="count")
def _likeliest(log_probs: Float[Array, "b v"], count: int) -> Int[Array, "b n"]:
    """Return the most likely tokens, all of them if fewer than `count` exist."""
    return jax.lax.top_k(log_probs, min(count, log_probs.shape[1]))[1]


@jax.jit
def _chosen(
    log_probs: Float[Array, "b v"], targets: Int[Array, " b"], tokens: Int[Array, "b n"]
) -> tuple[Float[Array, " b"], Float[Array, "b n"]]:
    both = jnp.concatenate([targets[:, None], tokens], axis=1)
    log_probs_of_both = jnp.take_along_axis(log_probs, both, axis=1)
    return log_probs_of_both[:, 0], log_probs_of_both[:, 1:]


def batches(count: int, size: int) -> Iterator[tuple[Int[np.ndarray, " b"], int]]:
    """Yield indices in batches of equal size, the last filled by repetition, and how many count."""
    size = min(size, count)
    for start in range(0, count, size):
        yield np.minimum(np.arange(start, start + size), count - 1), min(size, count - start)


def start_windows(engine: Engine, windows: Int[np.ndarray, "b n"], context: int) -> Run:
    """Prefill the context except its last token."""
    prompts, size = windows[:, : context - 1].tolist(), windows.shape[1]
    return start_run(engine, prompts, size - context, f"lower it, or `window` {size}")


def start_run(
    engine: Engine, prompts: Sequence[Sequence[int]], steps: int, remedy: str = "lower it"
) -> Run:
    """Prefill prompts, for `steps` decode steps; `remedy` is advice on `batch`."""
    try:
        return engine.start(prompts, max_new_tokens=steps)
    except MemoryShortageError as error:
        raise ParameterError("batch", f"{remedy} ({error})", len(prompts)) from None


def traffic(run: Run, kept: int) -> Traffic:
    """Return the traffic of all steps so far, of the first `kept` sequences."""
    decoder, tokens = run.decoder, len(run.counts) * kept
    past = run.prompt_lengths + np.arange(len(run.counts))[:, None]
    counted = np.broadcast_to(np.arange(past.shape[1]) < kept, past.shape)
    rows = rows_per_step(run.counts, counted)
    moved = moved_by(run, rows, counted, past, tokens, transfers=tokens)
    attended = np.ones(past.shape)
    if choosing := len(decoder.selecting):
        heads = decoder.config.num_kv_heads
        resident = np.minimum(past, decoder.slots.size - 1)
        streamed = (decoder.host_layers - choosing) * heads * np.minimum(past - resident, run.slots)
        chosen = (np.asarray(rows.selected) - streamed) / (choosing * heads)
        attended = (chosen + resident) / np.maximum(past, 1)
    return Traffic(**vars(moved), attended=float(attended[:, :kept].sum()))
