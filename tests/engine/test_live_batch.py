"""Sequences that join and leave a live batch give each one's result alone."""

from collections.abc import Sequence

import jax
import numpy as np
import pytest
from runtime import SPARSE, engine, numbers, random_model, tokens_of
from tiny import logits_of

from infinigen_jax.cache.host_array import Placement
from infinigen_jax.engine.engine import Engine
from infinigen_jax.engine.live_batch import LiveBatch, Reading, Single, chunk_lengths
from infinigen_jax.engine.lossless_batch import LosslessBatch
from infinigen_jax.engine.sampler import Sampler
from infinigen_jax.policies.quest import Quest
from infinigen_jax.prefill.prefill import empty_cache
from infinigen_jax.programs.compilations import compilations
from infinigen_jax.sampling import Sampling

PROMPTS = [numbers(n) for n in (137, 5, 70, 9, 64, 3)]
ROWS, CAPACITY, CHUNK, NEW = 3, 256, 64, 9
KINDS = [
    pytest.param(SPARSE, {}, id="exact"),
    pytest.param(SPARSE, {"rows": "int8", "hot_set": 1.5}, id="int8", marks=pytest.mark.slow),
    pytest.param(Quest(budget=0.3, window=4), {}, id="pages", marks=pytest.mark.slow),
]


def serve(made: Engine, prompts: list[list[int]], new: int = NEW) -> list[list[int]]:
    """Read prompts between steps; each leaves after `new` tokens and another one joins."""
    live = LiveBatch.empty(made.runtime, ROWS, CAPACITY)
    put = Placement(made.mesh).batch
    waiting, owner = list(enumerate(prompts)), {}
    answers: list[list[int]] = [[] for _ in prompts]
    reading, number = None, -1
    while waiting or owner or reading:
        if reading is None and waiting:
            number, prompt = waiting.pop(0)
            cache = empty_cache(made.decoder, 1, CAPACITY)
            reading = Reading(made.runtime, prompt, cache, CHUNK)
        if reading is not None and not reading.complete:
            reading.advance()
        free = np.flatnonzero(live.idle)
        if reading is not None and reading.complete and len(free) and live.can_join:
            live.join(int(free[0]), reading.single())
            owner[int(free[0])], reading = number, None
        best = np.asarray(live.best)
        if owner:
            live.step(jax.device_put(best, put))
        for sequence, prompt in list(owner.items()):
            answers[prompt].append(int(best[sequence]))
            if len(answers[prompt]) == new:
                live.leave(sequence)
                del owner[sequence]
    return answers


@pytest.mark.parametrize("policy, settings", KINDS)
def test_arrivals_equal_single_prompts(policy, settings):
    made = engine("one", policy, 0, prefill_chunk=CHUNK, **settings)
    expected = [tokens_of(made, [prompt], new=NEW, ignore_eos=True)[0] for prompt in PROMPTS]
    assert serve(made, PROMPTS) == expected
    before = compilations()
    assert serve(made, PROMPTS[::-1])[::-1] == expected
    assert compilations() == before


def test_an_idle_row_does_not_fill_the_cache():
    """A sequence that ran to the end of its cache rests while another one continues."""
    made = engine("one", SPARSE, 0, prefill_chunk=CHUNK)
    long = CAPACITY - len(PROMPTS[0]) - 1
    expected = tokens_of(made, PROMPTS[:1], new=long, ignore_eos=True)
    assert serve(made, [PROMPTS[0], PROMPTS[1]], long)[:1] == expected


def test_chunk_lengths():
    assert chunk_lengths(512) == [64, 128, 256, 512]
    assert chunk_lengths(200) == [64, 128, 200]
    assert chunk_lengths(7) == [7]


@pytest.mark.parametrize("policy, settings", KINDS)
def test_a_sequence_moves_between_batches(policy, settings):
    """Alone, then with another one, then alone again; at a flush, where a policy needs it."""
    made = engine("one", policy, 0, prefill_chunk=CHUNK, **settings)
    prompts = PROMPTS[0], PROMPTS[2]
    expected = [tokens_of(made, [prompt], new=40, ignore_eos=True)[0] for prompt in prompts]
    whole = LiveBatch.empty(made.runtime, ROWS, CAPACITY)
    move(made, whole, prompts)
    before = compilations()
    answers = move(made, whole, prompts)
    assert compilations() == before
    for answer, tokens in zip(answers, expected, strict=True):
        assert len(answer) >= NEW and answer == tokens[: len(answer)]


def move(made: Engine, whole: LiveBatch, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Decode the first prompt in three batches in turn, in the second with the other prompts."""
    answers: list[list[int]] = [[], []]
    put = Placement(made.mesh).batch

    def decode(live: LiveBatch, owners: dict[int, int]) -> None:
        before = len(answers[0])
        while len(answers[0]) < before + NEW or not live.can_join:
            best = np.asarray(live.best)
            for sequence, owner in owners.items():
                answers[owner].append(int(best[sequence]))
            live.step(jax.device_put(best, put))

    alone = LiveBatch(made.runtime, 1)
    alone.take(read(made, prompts[0]))
    decode(alone, {0: 0})
    whole.join(1, alone.single(0))
    alone.release()
    whole.join(0, read(made, prompts[1]))
    decode(whole, {1: 0, 0: 1})
    alone.take(whole.single(1))
    whole.leave(0)
    decode(alone, {0: 0})
    return answers


def read(made: Engine, prompt: list[int], capacity: int = CAPACITY) -> Single:
    cache = empty_cache(made.decoder, 1, capacity)
    reading = Reading(made.runtime, prompt, cache, CHUNK)
    while not reading.complete:
        reading.advance()
    return reading.single()


def test_a_lossless_sequence_moves_between_batches_and_drafts_by_its_budget():
    """Tokens are the plain forward pass's in each batch; a smaller budget only fetches less."""
    made = engine("one", SPARSE, 0, prefill_chunk=CHUNK, lossless=True, draft_tokens=2)
    capacity, fetched = CAPACITY + made.runtime.draft_room, {}
    for budget in (SPARSE.budget, SPARSE.budget / 4):
        prompt = read(made, PROMPTS[0], capacity)
        first = prompt.newest[1]
        alone, whole = (
            LosslessBatch(made.runtime, 1),
            LosslessBatch.empty(made.runtime, 2, capacity),
        )
        alone.take(prompt._replace(newest=first, budget=budget, room=19))
        answer, rows = [int(first[0])], 0
        for live, sequence in ((alone, 0), (whole, 1)):
            if live is whole:
                whole.join(1, alone.single(0))
            batch = len(live.active)
            sampler = Sampler(made.mesh, 96, [Sampling()] * batch, [()] * batch)
            for _ in range(3):
                done = live.round(sampler)
                answer += done.tokens[sequence, : done.counts[sequence]].tolist()
                rows += sum(int(counts.moved[sequence]) for counts in done.drafted.counts)
        text = np.array([[*PROMPTS[0], *answer, *[0] * 20][:160]], np.int32)
        best = logits_of(random_model("one"), text)[0, 136:].argmax(axis=-1)
        assert len(answer) > 6 and answer == best[: len(answer)].tolist()
        fetched[budget] = rows
    assert fetched[SPARSE.budget / 4] < fetched[SPARSE.budget] / 2
