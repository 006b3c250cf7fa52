"""Likelihoods of continuations, and greedy answers, through the engine.

All tokens of a context except the last are prefilled; the last one and the continuation are
decoded. A question is decoded token by token, because prefill computes the same for every policy:
the first token of an answer would be that of the full cache.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int

from infinigen_jax.engine.engine import Engine
from infinigen_jax.engine.prompts import capacity_for
from infinigen_jax.errors import InputError
from infinigen_jax.evaluation.scoring import (
    READ_EVERY,
    Traffic,
    batches,
    check_finite,
    score_run,
    start_run,
    traffic,
)
from infinigen_jax.models import ModelConfig
from infinigen_jax.prefill.prefill import prefill


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
        texts = [prompts[i] for i in rows]
        last = min(decoded, *(len(text) - 1 for text in texts))
        cached = [text[:-last] for text in texts]
        room = max(1, engine.model.config.fitting(last + new, cached) - last)
        run = start_run(engine, cached, last + room)
        for tokens in np.array([text[-last:] for text in texts], np.int32).T:
            log_probs = run.predict(tokens)
        check_finite(engine, np.asarray(log_probs.max(axis=1)))
        drawn = [run.drawn]
        for i in range(1, room):
            run.advance()
            drawn.append(run.drawn)
            if i % READ_EVERY == 0 and (_up_to_end(engine, drawn)[:, -1] < 0).all():
                break
        answered = np.full((kept, new), -1, np.int32)
        answered[:, : len(drawn)] = _up_to_end(engine, drawn)[:kept]
        answers.append(answered)
        total += traffic(run, kept)
        del run  # the next batch needs its memory
        advance(kept)
    return np.concatenate(answers), total


def _up_to_end(engine: Engine, drawn: Sequence[Array]) -> Int[np.ndarray, "b n"]:
    """Return the tokens of some steps, with -1 after the end of a text."""
    tokens = np.stack([np.asarray(step) for step in drawn], axis=1)
    ends = np.isin(tokens, list(engine.model.eos_ids))
    return np.where(np.logical_or.accumulate(ends, axis=1), -1, tokens)


class Continuation(NamedTuple):
    """A text to score, given a context."""

    context: Sequence[int]
    text: Sequence[int]


def likelihoods(
    engine: Engine,
    asked: Sequence[Continuation],
    batch: int,
    advance: Callable[[int], object] = lambda continuations: None,
) -> tuple[Float[np.ndarray, "n 2"], Traffic]:
    """Score continuations of any lengths.

    Args:
        asked: contexts and texts of at least one token. A context too long for the model's
            positions loses its first tokens; see `ModelConfig.room`.
        batch: batch size. An incomplete batch repeats continuations to fill up.

    Returns:
        [n, 2] float64, the natural log-likelihood, and 1 if every token of the text is the most
        likely one, else 0; and the traffic.
    """
    config = engine.model.config
    # The first token after a context of one token: nothing is cached to select from, and the engine
    # prefills at least one token before its first step.
    cut = [_cut(one, config) for one in asked]
    first = [i for i, one in enumerate(cut) if len(one.context) == 1]
    result, total = np.array([[0.0, 1.0]] * len(asked)).reshape(-1, 2), Traffic()
    for i in first:
        result[i] = _first_token(engine, cut[i].context[0], cut[i].text[0])
        cut[i] = Continuation([*cut[i].context, cut[i].text[0]], cut[i].text[1:])
    advance(sum(not one.text for one in cut))
    for rows in _batches(cut, batch, config):
        chosen = [cut[i] for i in rows]
        filled = [*chosen, *[chosen[-1]] * (batch - len(chosen))]
        lengths = np.array([len(one.text) for one in filled])
        run = start_run(engine, [one.context[:-1] for one in filled], int(lengths.max()))
        tokens = np.zeros((batch, lengths.max() + 1), np.int32)
        for row, one in zip(tokens, filled, strict=True):
            row[: len(one.text) + 1] = [one.context[-1], *one.text]
        scores = score_run(run, tokens, len(chosen))
        inside = np.arange(lengths.max()) < lengths[: len(chosen), None]
        greedy = (scores.best == tokens[: len(chosen), 1:]) | ~inside
        result[rows, 0] += np.where(inside, -scores.nats, 0).sum(axis=1)
        result[rows, 1] *= greedy.all(axis=1)
        total += traffic(run, len(chosen))
        del run  # the next batch needs its memory
        advance(len(rows))
    check_finite(engine, result)
    return result, total


def _cut(one: Continuation, config: ModelConfig) -> Continuation:
    """Leave out first tokens of the context if the model has no room for all."""
    limit = config.max_positions
    kept = min(len(one.context), limit - len(one.text))
    if config.longest_short and len(one.text) > config.room(kept - 1):
        limit = config.longest_short
    if len(one.text) >= limit:
        raise InputError(
            f"a text to score has {len(one.text)} tokens, and the model {limit} positions; "
            "shorten it"
        )
    return Continuation(one.context[len(one.text) - limit :], one.text)


def _first_token(engine: Engine, token: int, target: int) -> tuple[float, float]:
    """Return a token's log-likelihood after a single one, and whether it is the most likely."""
    decoder, one = engine.decoder, np.ones((1, 1), np.int32)
    capacity = capacity_for(decoder, 1)
    slots = decoder.host_slots(1, capacity)
    read = prefill(decoder, engine.runtime.weights, token * one, one[0], capacity, slots)
    logits = np.asarray(read.logits, np.float64)[0]
    top = logits.max()
    score = logits[target] - top - np.log(np.exp(logits - top).sum())
    return float(score), float(logits.argmax() == target)


def _batches(cut: Sequence[Continuation], batch: int, config: ModelConfig) -> Iterator[list[int]]:
    """Yield batches of continuations of similar lengths for which the model has room together.

    Every sequence of a batch takes as many steps as the longest text.
    """
    order = [i for i, one in enumerate(cut) if one.text]
    order.sort(key=lambda i: (len(cut[i].text), len(cut[i].context)))
    chosen: list[int] = []
    for i in order:
        room = min(config.room(len(cut[j].context) - 1) for j in [*chosen, i])
        if len(chosen) == batch or len(cut[i].text) > room:
            yield chosen
            chosen = []
        chosen.append(i)
    if chosen:
        yield chosen
