"""Greedy answers through the engine: prefill a context, decode the question, then generate.

The question is decoded, token by token, for what prefill computes does not depend on the policy:
the first token of an answer would otherwise be the full cache's.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Int

from infinigen_jax.errors import InputError, MemoryShortageError
from infinigen_jax.evaluation.scoring import Traffic, batches, traffic

if TYPE_CHECKING:
    from infinigen_jax.engine.engine import Engine

READ_EVERY = 64  # steps; as many stay queued at most


def answer(
    engine: "Engine",
    prompts: Sequence[Sequence[int]],
    decoded: int,
    new: int,
    batch: int,
    advance: Callable[[int], object] = lambda prompts: None,
) -> tuple[Int[np.ndarray, "p n"], Traffic]:
    """Continue prompts greedily.

    Args:
        prompts: token numbers, at least two each; lengths may differ.
        decoded: so many last tokens of each prompt are decoded, the others prefilled; at least 1,
            and less if a prompt is not longer.
        new: tokens to generate, fewer where the model's positions end; what follows the end of a
            text counts for nothing.
        batch: prompts at once. The last batch is filled up with repetitions, so that one
            compilation serves all; they do not count.
        advance: called with a number of prompts when so many more have been answered.

    Returns:
        The new tokens, int32, -1 behind the end of a text; and what moved.

    Raises:
        InputError: if memory or the model's positions are too few.
    """
    answers, total = [], Traffic()
    for rows, kept in batches(len(prompts), batch):
        tokens, moved = _answer_batch(engine, [prompts[i] for i in rows], decoded, new, kept)
        answers.append(tokens)
        total += moved
        advance(kept)
    return np.concatenate(answers), total


def _answer_batch(
    engine: "Engine", prompts: list[Sequence[int]], decoded: int, new: int, kept: int
) -> tuple[Int[np.ndarray, "k n"], Traffic]:
    """Of the first `kept` prompts."""
    longest, shortest = (choose(map(len, prompts)) for choose in (max, min))
    decoded = min(decoded, shortest - 1)
    size, new = new, min(new, max(1, engine.model.config.max_positions - longest))
    try:
        run = engine.start([p[:-decoded] for p in prompts], decoded + new)
    except MemoryShortageError as error:
        raise InputError(f"--batch {len(prompts)}: lower it ({error})") from None
    given = np.array([p[-decoded:] for p in prompts], np.int32)
    for i in range(decoded):
        # What was drawn gives way to what is there; behind the last of it, the answer begins.
        run.drawn = jax.device_put(given[:, i], run.drawn.sharding)
        run.advance()
    drawn = [run.drawn]
    for i in range(1, new):
        run.advance()
        drawn.append(run.drawn)
        if i % READ_EVERY == 0 and _ended(engine, drawn):
            break
    tokens = np.full((kept, size), -1, np.int32)
    made = np.stack([np.asarray(step) for step in drawn], axis=1)[:kept]
    for row, one in zip(tokens, made, strict=True):
        ends = np.flatnonzero(np.isin(one, engine.model.config.eos_ids))
        end = ends[0] if len(ends) else len(one)
        row[:end] = one[:end]
    return tokens, traffic(run, kept)


def _ended(engine: "Engine", drawn: Sequence[Any]) -> bool:
    """Whether every text has."""
    tokens = np.stack([np.asarray(step) for step in drawn])
    return bool(np.isin(tokens, engine.model.config.eos_ids).any(axis=0).all())
