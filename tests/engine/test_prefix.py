"""A beginning that a batch shares is read once and stored once, and changes no token."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime import (
    ALL,
    NEW,
    SPARSE,
    engine,
    finished,
    numbers,
    random_model,
    slow_except,
    tokens_of,
    with_rope,
)
from tiny import refuses

from infinigen_jax import Engine, Pool, Run, Sampling
from infinigen_jax.engine.memory_plan import prefill_bytes, step_bytes
from infinigen_jax.engine.prompts import UNIT, choose_sharing, common_prefix
from infinigen_jax.policies import H2O, Full, Policy
from infinigen_jax.programs.compilations import compilations

PREFIX = numbers(141, 1)
ENDS = [numbers(1, 2), numbers(37, 3), numbers(12, 4), numbers(70, 5), numbers(3, 6)]
WHOLE = [[*PREFIX, *end] for end in ENDS]
SETTINGS: dict[str, tuple[str, Policy, dict[str, Any]]] = {
    "infinigen": ("gqa", SPARSE, {}),
    "layerwise": ("windows", ALL, {"dense_layers": 0, "hot_set": 1.5, "schedule": "layerwise"}),
    "full": ("opt", Full(window=4), {"dense_layers": 1}),
    "h2o": ("gqa", H2O(budget=0.2, window=4, sinks=2), {}),
}


def shared(made: Engine, **settings: Any) -> Run:
    return finished(made, WHOLE, prefix=len(PREFIX), **settings)


@pytest.mark.parametrize("name", slow_except(SETTINGS, "infinigen"))
def test_tokens_equal_those_of_whole_prompts(name):
    """The second batch finds every program compiled and keeps the host array in place."""
    model, policy, settings = SETTINGS[name]
    made = engine(model, policy, **settings)
    run = shared(made)
    # Chunks as long as those of the ends, whose programs are compiled.
    whole = engine(model, policy, prefill_chunk=128, **settings)
    assert run.new_tokens == tokens_of(whole, WHOLE, ignore_eos=True)
    assert run.stats().prompt_tokens_read == len(PREFIX) + sum(map(len, ENDS))
    before = compilations()
    prompts = [[*PREFIX, *end[::-1]] for end in ENDS]
    run = made.start(prompts, max_new_tokens=NEW, prefix=len(PREFIX))
    address = run.cache.host.unsafe_buffer_pointer()
    for _ in run.tokens(ignore_eos=True):
        assert run.cache.host.unsafe_buffer_pointer() == address
    assert compilations() == before and run.stats().compilations_after_warmup == 0


@pytest.mark.slow
def test_prompts_that_are_admitted_later():
    made, sampling = engine("gqa"), Sampling(temperature=1.0, seed=4)
    run = shared(made, batch=2, sampling=sampling)
    assert run.new_tokens == tokens_of(made, WHOLE, sampling=sampling, ignore_eos=True)
    assert run.stats().prompt_tokens_read == len(PREFIX) + sum(map(len, ENDS))


@pytest.mark.slow
def test_where_keys_depend_on_the_prompt_s_length_nothing_is_shared():
    """The base of dynamic frequencies grows with the whole prompt."""
    for original, read in ((160, sum(map(len, WHOLE))), (256, len(PREFIX) + sum(map(len, ENDS)))):
        dynamic = {"kind": "dynamic", "factor": 4.0, "original_positions": original}
        model = with_rope(random_model("one"), **dynamic)
        made = Engine(model, policy=Full(window=4), dense_layers=0)
        run = shared(made)
        assert run.stats().prompt_tokens_read == read
        assert run.new_tokens == tokens_of(made, WHOLE, ignore_eos=True)


@pytest.mark.slow
def test_small_rows_are_what_they_are_in_chunks():
    """A prefix is the first chunk, which determines the scales of rows."""
    prefix, ends = PREFIX[:128], ENDS[1:4:2]
    prompts = [[*prefix, *end] for end in ends]
    chunked = engine("one", rows="int8", prefill_chunk=128)
    expected = tokens_of(chunked, prompts, ignore_eos=True)
    given = tokens_of(engine("one", rows="int8"), ends, prefix=prefix, ignore_eos=True)
    assert given == expected


def test_rows_are_stored_once():
    made = engine("gqa")
    run, whole = shared(made), made.start(WHOLE, max_new_tokens=NEW)
    host = run.cache.host
    # One unit is shared by the five sequences, and one is each one's own.
    assert host.shape == (1, 5 + 1, 2, UNIT, 16) and run.capacity == 2 * UNIT
    assert whole.cache.host.shape == (1, 5, 2, 2 * UNIT, 16)
    assert run.stats().host_cache_bytes == host.nbytes < 0.61 * whole.cache.host.nbytes
    assert host.sharding.memory_kind == "pinned_host"
    rows, expected = np.asarray(host), np.asarray(whole.cache.host)
    for i, end in enumerate(ENDS):
        np.testing.assert_allclose(rows[:, 5], expected[:, i, :, :UNIT], atol=2e-4, rtol=2e-4)
        unshared = len(PREFIX) + len(end) - UNIT
        got, wanted = rows[:, i, :, :unshared], expected[:, i, :, UNIT : UNIT + unshared]
        np.testing.assert_allclose(got, wanted, atol=2e-4, rtol=2e-4)


def test_the_prefix_that_is_given_is_what_is_shared():
    """The common beginning of the prompts is not detected."""
    made, longer = engine("gqa"), [[*PREFIX, 7, 8, *end] for end in ENDS]
    for asked, told, ends in ((longer, 141, 2 * len(ENDS)), (WHOLE, 200, 0)):
        run = made.start(asked, max_new_tokens=5, prefix=told)
        assert run.stats().prompt_tokens_read == 141 + sum(map(len, ENDS)) + ends
    for asked, shared in (([PREFIX] * 2, 140), ([[5], [6, 7]], 0), ([[5, 6, 7], [6, 6, 7]], 0)):
        assert common_prefix(asked) == shared
    assert made.prefix_tokens(PREFIX) == 141 and made.prefix_tokens("") == 0


def test_the_plan_is_of_what_comes_one_after_the_other():
    """The prefix alone, a copy for each sequence, their ends, steps, and one more sequence."""
    made = engine("gqa")
    run = made.start(WHOLE, max_new_tokens=NEW, batch=2, prefix=len(PREFIX))
    alone, copied, ends, step, waiting = run.phases
    batch, one = run.cache.host.nbytes, alone.host_cache
    assert one == batch * 2 // 3  # of two units; of them one is shared
    assert [plan.host_cache - batch for plan in run.phases] == [one - batch, one, one, one, 2 * one]
    assert 2 * alone.dense_cache == run.plan.dense_cache
    assert 3 * alone.dense_cache == copied.dense_cache
    sizes = made.decoder, made.runtime.weights.params
    assert alone.workspace == prefill_bytes(*sizes, 1, 192, run.capacity)
    assert ends.workspace == prefill_bytes(*sizes, 2, 128, run.capacity)
    assert step.workspace == step_bytes(*sizes, 2, run.capacity)
    assert waiting.workspace == prefill_bytes(*sizes, 1, 128, run.capacity)
    together = made.start(WHOLE, max_new_tokens=NEW, prefix=len(PREFIX))
    assert [plan.dense_cache // alone.dense_cache for plan in together.phases] == [1, 6, 5, 5]
    whole = made.start(WHOLE, max_new_tokens=NEW)
    assert [plan.dense_cache for plan in whole.phases] == [5 * alone.dense_cache] * 2


@pytest.mark.slow
def test_a_row_of_a_batch_with_small_rows_gives_what_it_gives_alone():
    """Rows are scaled by the prefix, and else by the first chunk, which is as long for all."""
    made = engine("gqa", SPARSE, 1, rows="int8", prefill_chunk=192)
    ends = [[*PREFIX, *end] for end in ENDS[1:4]]
    for prompts, prefix in ((ends, 141), ([numbers(200, 7), numbers(150, 8)], 0)):
        both = made.start(prompts, max_new_tokens=30, prefix=prefix)
        list(both.tokens(ignore_eos=True))
        for i, prompt in enumerate(prompts):
            run = made.start([prompt], max_new_tokens=30, prefix=prefix)
            assert [*run.tokens(ignore_eos=True)] and run.new_tokens[0] == both.new_tokens[i]
            for one, row in zip(run.cache.scales, both.cache.scales, strict=True):
                np.testing.assert_allclose(one.centre[0], row.centre[i], rtol=1e-3, atol=1e-3)


def test_text_is_tokenised_whole():
    def encode(text: str, **_: bool) -> list[int]:
        return [ord(c) % 90 for c in text.replace("ab", "z")]

    tokenizer = SimpleNamespace(encode=encode)  # "ab" is one token
    model = dataclasses.replace(random_model("gqa"), given_tokenizer=tokenizer)
    made = Engine(model, policy=SPARSE)
    assert made.encode_with_prefix("xxa", ["b", "c"]) == [made.encode("xxz"), made.encode("xxac")]
    refuses("as text or as token ids", made.generate, [[5]], prefix="xxa")
    refuses("prefix: .*UTF-8", made.generate, "b", prefix="\ud800")


def test_a_pool_is_refused():
    made = engine("gqa", pool=Pool(tokens=50))
    refuses("pool: not with a shared prefix", made.generate, ENDS, None, NEW, prefix=PREFIX)


@settings(max_examples=200)
@given(prefix=st.integers(1, 5000), unshared=st.integers(1, 3000), batch=st.integers(1, 40))
def test_shared_layouts_have_room_and_waste_nothing(prefix, unshared, batch):
    decoder = engine("gqa").decoder
    sharing = choose_sharing(decoder, prefix, prefix + unshared, batch)
    assert sharing.capacity >= prefix + unshared and sharing.unshared % UNIT == 0
    assert sharing.sequences * sharing.unshared <= max(0, prefix - decoder.policy.window)
    slots = sharing.host_sequences(batch) * sharing.unshared
    assert slots <= batch * -(-(prefix + unshared) // UNIT) * UNIT
    if prefix > 4 * (unshared + UNIT) and batch > 8:
        assert slots < 0.6 * batch * (prefix + unshared)
