"""Sequences that move between live batches give what each gives alone."""

from collections.abc import Sequence

import jax
import numpy as np
import pytest
from runtime import SPARSE, engine, numbers, tokens_of

from infinigen_jax.cache.host_array import Placement
from infinigen_jax.engine.engine import Engine
from infinigen_jax.engine.live_batch import LiveBatch, Reading, Single
from infinigen_jax.engine.lossless_batch import LosslessBatch
from infinigen_jax.engine.sampler import Sampler
from infinigen_jax.policies.quest import Quest
from infinigen_jax.programs.compilations import compilations
from infinigen_jax.sampling import Sampling

PROMPTS = [numbers(n) for n in (137, 70)]
ROWS, CAPACITY, CHUNK, NEW = 3, 256, 64, 9


def read(made: Engine, prompt: list[int], capacity: int = CAPACITY) -> Single:
    """Read a prompt."""
    reading = Reading(made.runtime, prompt, capacity, CHUNK)
    while not reading.complete:
        reading.advance()
    return reading.single()


def move(made: Engine, whole: LiveBatch, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Decode the first prompt in three batches after each other, in the second with the other."""
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


@pytest.mark.parametrize(
    "policy, settings",
    [
        pytest.param(SPARSE, {}, id="exact"),
        pytest.param(SPARSE, {"rows": "int8", "hot_set": 1.5}, id="int8", marks=pytest.mark.slow),
        pytest.param(Quest(budget=0.3, window=4), {}, id="pages", marks=pytest.mark.slow),
    ],
)
def test_a_sequence_moves_between_batches(policy, settings):
    """Alone, then with another one, then alone again; at a flush, where a policy needs it."""
    made = engine("one", policy, 0, prefill_chunk=CHUNK, **settings)
    expected = [tokens_of(made, [prompt], new=40, ignore_eos=True)[0] for prompt in PROMPTS]
    whole = LiveBatch.empty(made.runtime, ROWS, CAPACITY)
    move(made, whole, PROMPTS)
    before = compilations()
    answers = move(made, whole, PROMPTS)
    assert compilations() == before
    for answer, tokens in zip(answers, expected, strict=True):
        assert len(answer) >= NEW and answer == tokens[: len(answer)]


def test_a_lossless_sequence_moves_between_batches_and_drafts_by_its_budget():
    """Tokens are the full cache's in each batch; a smaller budget only fetches fewer rows."""
    made = engine("one", SPARSE, 0, prefill_chunk=CHUNK, lossless=True, draft_tokens=2)
    expected = tokens_of(made, [PROMPTS[0]], new=20, ignore_eos=True)[0]
    capacity, fetched = CAPACITY + made.runtime.draft_room, {}
    for budget in (SPARSE.budget, SPARSE.budget / 4):
        prompt = read(made, PROMPTS[0], capacity)
        first = prompt.newest[1]
        alone = LosslessBatch(made.runtime, 1)
        whole = LosslessBatch.empty(made.runtime, 2, capacity)
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
        assert len(answer) > 6 and answer == expected[: len(answer)]
        fetched[budget] = rows
    assert fetched[SPARSE.budget / 4] < fetched[SPARSE.budget] / 2
