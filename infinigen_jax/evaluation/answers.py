"""Greedy answers through the engine: prefill a context, decode the question, then generate.

The question is decoded token by token, because prefill computes the same for every policy: the
first token of an answer would be that of the full cache.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from infinigen_jax.engine.engine import Engine
from infinigen_jax.evaluation.scoring import Traffic, batches, check_finite, start_run, traffic

READ_EVERY = 64  # steps between reads; bounds the queue of the device


def answer(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    decoded: int,
    new: int,
    batch: int,
    advance: Callable[[int], object] = lambda prompts: None,
) -> tuple[Int[np.ndarray, "p n"], Traffic]:
    """Continue prompts greedily.

    Args:
        prompts: token ids, at least two per prompt; lengths may differ.
        decoded: number of last tokens of each prompt to decode, at least 1; the others are
            prefilled. Reduced to leave every prompt one token to prefill.
        new: tokens to generate, fewer if the model has no room for them; tokens after the end of
            a text are ignored.
        batch: batch size. The last batch repeats prompts to fill up, so that one compilation
            serves all.

    Returns:
        The new tokens, int32, with -1 after the end of a text; and the traffic.
    """
    answers, total = [], Traffic()
    for rows, kept in batches(len(prompts), batch):
        tokens, moved = _answer_batch(engine, [prompts[i] for i in rows], decoded, new, kept)
        answers.append(tokens)
        total += moved
        advance(kept)
    return np.concatenate(answers), total


def _answer_batch(
    engine: Engine, prompts: list[Sequence[int]], decoded: int, new: int, kept: int
) -> tuple[Int[np.ndarray, "k n"], Traffic]:
    """Answer the first `kept` prompts; the others fill the batch."""
    decoded = min(decoded, *(len(prompt) - 1 for prompt in prompts))
    cached = [p[:-decoded] for p in prompts]
    most = engine.model.config.fitting(decoded + new, cached)
    size, new = new, max(1, most - decoded)
    run = start_run(engine, cached, decoded + new)
    given = np.array([p[-decoded:] for p in prompts], np.int32)
    log_probs = run.predict(given[:, 0])
    for i in range(1, decoded):
        log_probs = run.predict(given[:, i])
    check_finite(engine, np.asarray(log_probs.max(axis=1)))
    drawn = [run.drawn]
    for i in range(1, new):
        run.advance()
        drawn.append(run.drawn)
        if i % READ_EVERY == 0 and _ended(engine, drawn):
            break
    tokens = np.full((kept, size), -1, np.int32)
    generated = np.stack([np.asarray(step) for step in drawn], axis=1)[:kept]
    for row, answer in zip(tokens, generated, strict=True):
        ends = np.flatnonzero(np.isin(answer, list(engine.model.eos_ids)))
        end = ends[0] if len(ends) else len(answer)
        row[:end] = answer[:end]
    return tokens, traffic(run, kept)


def _ended(engine: Engine, drawn: Sequence[Any]) -> bool:
    tokens = np.stack([np.asarray(step) for step in drawn])
    return bool(np.isin(tokens, list(engine.model.eos_ids)).any(axis=0).all())
