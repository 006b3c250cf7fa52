"""Sequences that join and leave a live batch give what each gives alone."""

import jax
import numpy as np
import pytest
from runtime import SPARSE, engine, tokens_of

from infinigen_jax.cache.host_array import Placement
from infinigen_jax.engine.engine import Engine
from infinigen_jax.engine.live_batch import LiveBatch, Reading, chunk_lengths
from infinigen_jax.policies.quest import Quest
from infinigen_jax.programs.compilations import compilations

PROMPTS = [
    [int(i) for i in np.random.default_rng(n).integers(3, 96, n)] for n in (137, 5, 70, 9, 64, 3)
]
ROWS, CAPACITY, CHUNK, NEW = 3, 256, 64, 9


def serve(made: Engine, prompts: list[list[int]], new: int = NEW) -> list[list[int]]:
    """Read prompts between steps; each leaves after `new` tokens and another one joins."""
    live = LiveBatch(made.runtime, ROWS, CAPACITY)
    put = Placement(made.mesh).batch
    waiting, owner = list(enumerate(prompts)), {}
    answers: list[list[int]] = [[] for _ in prompts]
    reading, number = None, -1
    while waiting or owner or reading:
        if reading is None and waiting:
            number, prompt = waiting.pop(0)
            reading = Reading(made.runtime, prompt, CAPACITY, CHUNK)
        if reading is not None and not reading.complete:
            reading.advance()
        free = np.flatnonzero(live.idle)
        if reading is not None and reading.complete and len(free) and live.can_join:
            live.join(int(free[0]), reading)
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


@pytest.mark.parametrize(
    "policy, settings",
    [
        pytest.param(SPARSE, {}, id="exact"),
        pytest.param(SPARSE, {"rows": "int8", "hot_set": 1.5}, id="int8", marks=pytest.mark.slow),
        pytest.param(Quest(budget=0.3, window=4), {}, id="pages", marks=pytest.mark.slow),
    ],
)
def test_arrivals_equal_single_prompts(policy, settings):
    made = engine("one", policy, 0, prefill_chunk=CHUNK, **settings)
    expected = [tokens_of(made, [prompt], new=NEW, ignore_eos=True)[0] for prompt in PROMPTS]
    assert serve(made, PROMPTS) == expected
    before = compilations()
    assert serve(made, PROMPTS[::-1])[::-1] == expected
    assert compilations() == before


def test_an_idle_row_does_not_fill_the_cache():
    """A sequence that ran to the end of its cache rests while another one goes on."""
    made = engine("one", SPARSE, 0, prefill_chunk=CHUNK)
    long = CAPACITY - len(PROMPTS[0]) - 1
    expected = tokens_of(made, PROMPTS[:1], new=long, ignore_eos=True)
    assert serve(made, [PROMPTS[0], PROMPTS[1]], long)[:1] == expected


def test_chunk_lengths():
    assert chunk_lengths(512) == [64, 128, 256, 512]
    assert chunk_lengths(200) == [64, 128, 200]
    assert chunk_lengths(7) == [7]
