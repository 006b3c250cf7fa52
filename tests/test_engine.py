"""The engine: schedules, policies and batches agree with each other and with transformers."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runtime import HF, random_model, without_eos
from tiny import ROOT, make_tiny

from infinigen_jax import planning
from infinigen_jax.cache import DenseLayer
from infinigen_jax.checkpoint import embedded, load
from infinigen_jax.compilations import compilations
from infinigen_jax.convert import convert
from infinigen_jax.engine import Engine
from infinigen_jax.errors import InputError
from infinigen_jax.policies import Full, InfiniGen
from infinigen_jax.run import Run
from infinigen_jax.sampling import Sampling

# A small window and few sinks, so that most rows are on the host and flushes are frequent.
SPARSE = InfiniGen(budget=0.2, window=4, sinks=2, partial_ratio=0.5)
ALL = InfiniGen(alpha=float("inf"), budget=1.0, window=4, sinks=2)

RAGGED = [
    [int(i) for i in np.random.default_rng(n).integers(3, 96, n)] for n in (37, 5, 21)
]  # one shorter than window and sinks together
NEW = 14  # several windows


@functools.cache
def engine(name: str, policy=SPARSE, dense_layers: int = 2, schedule: str = "fused") -> Engine:
    return Engine(random_model(name), policy=policy, dense_layers=dense_layers, schedule=schedule)


def tokens_of(engine: Engine, prompts=RAGGED, new: int = NEW, **settings) -> list[list[int]]:
    return engine.generate(prompts, max_new_tokens=new, **settings).tokens


def counts_of(run: Run) -> np.ndarray:
    """Rows fetched by each step and sequence."""
    return np.stack([np.asarray(count) for count in run._counts])


def finished(engine: Engine, prompts=RAGGED, new: int = NEW) -> Run:
    run = engine.start(prompts, new)
    for _ in run.tokens(ignore_eos=True):
        pass
    return run


# Everything fetched is the full cache; the full cache is transformers.


# OPT is multi-head attention too, so LLaMA's need not be compiled every time.
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n == "mha" else ()) for n in HF]
)
def test_everything_fetched_equals_the_full_cache(name):
    full, everything = engine(name, Full()), engine(name, ALL)
    for prompts in (RAGGED, RAGGED[:1]) if name == "gqa" else (RAGGED,):
        assert tokens_of(everything, prompts) == tokens_of(full, prompts)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-opt"])
def test_embedded_models_everything_fetched_equals_the_full_cache(name):
    model = load(embedded(name))
    prompts = ["The king said to the", "It was a dark and stormy night, and the old man had to go"]
    got = [
        Engine(model, policy=policy).generate(prompts, max_new_tokens=24)
        for policy in (ALL, Full())
    ]
    assert got[0].tokens == got[1].tokens and got[0].texts == got[1].texts


@pytest.mark.parametrize("name", ["stories260k"])
def test_real_checkpoints_everything_fetched_equals_the_full_cache(name, tmp_path):
    source = ROOT.parent / "shared" / "checkpoints" / name
    if not source.is_dir():
        pytest.skip("the folder of shared checkpoints is not here")
    model = load(convert(source, tmp_path / "out"))
    prompts = ["Once upon a time, there was a little girl named Lily."]
    got = [tokens_of(Engine(model, policy=p), prompts, 24) for p in (ALL, Full())]
    assert got[0] == got[1]


@pytest.mark.parametrize("family, settings", [("llama", {"num_key_value_heads": 2}), ("opt", {})])
def test_full_cache_equals_greedy_generation_of_transformers(family, settings, tmp_path):
    import torch

    reference = make_tiny(tmp_path / "source", family, num_hidden_layers=3, **settings)
    model = load(convert(reference.folder, tmp_path / "out", skew="none"))
    model = dataclasses.replace(model, path=None)  # there is no tokenizer in it
    prompts = [prompt[:30] for prompt in RAGGED]
    got = {
        "full": tokens_of(Engine(model, policy=Full()), prompts, ignore_eos=True),
        "everything": tokens_of(Engine(model, policy=ALL), prompts, ignore_eos=True),
    }
    for i, prompt in enumerate(prompts):
        sequence = torch.tensor([prompt])
        for _ in range(NEW):
            with torch.no_grad():
                logits = reference.model(sequence).logits[:, -1]
            sequence = torch.cat([sequence, logits.argmax(-1, keepdim=True)], dim=1)
        expected = sequence[0, len(prompt) :].tolist()
        for name, tokens in got.items():
            assert tokens[i] == expected, name


# Schedules.


@pytest.mark.parametrize("dense_layers", [0, 1, 2, 4])
@pytest.mark.parametrize("policy", [SPARSE, Full()], ids=["infinigen", "full"])
def test_schedules_are_equal(policy, dense_layers):
    runs = [finished(engine("gqa", policy, dense_layers, s)) for s in ("fused", "layerwise")]
    assert runs[0].new_tokens == runs[1].new_tokens
    np.testing.assert_array_equal(counts_of(runs[0]), counts_of(runs[1]))
    if dense_layers == 4:
        assert runs[0].cache.host is None and runs[0].stats().fetched_fraction == 0
        assert runs[0].new_tokens == finished(engine("gqa", Full())).new_tokens
    if isinstance(policy, Full) and dense_layers != 2:
        assert runs[0].new_tokens == finished(engine("gqa", Full())).new_tokens


def test_schedules_are_equal_for_opt():
    runs = [finished(engine("opt", SPARSE, 1, s)) for s in ("fused", "layerwise")]
    assert runs[0].new_tokens == runs[1].new_tokens
    np.testing.assert_array_equal(counts_of(runs[0]), counts_of(runs[1]))


# Batches.


@pytest.mark.parametrize("name", ["gqa", "opt"])
def test_a_row_does_not_depend_on_its_neighbours(name):
    new = 30
    together = finished(engine(name), RAGGED, new)
    alone = [finished(engine(name), [prompt], new) for prompt in RAGGED]
    assert together.new_tokens == [run.new_tokens[0] for run in alone]
    counts = np.concatenate([counts_of(run) for run in alone], axis=1)
    np.testing.assert_array_equal(counts_of(together), counts)
    assert (counts.max(axis=0) > 0).all()  # rows were fetched for each
    order = [2, 0, 1]
    permuted = finished(engine(name), [RAGGED[i] for i in order], new)
    assert permuted.new_tokens == [together.new_tokens[i] for i in order]


def test_sparse_selection_does_something():
    """The settings of these tests fetch some rows and not others, and that shows."""
    sparse, full = finished(engine("gqa"), new=30), finished(engine("gqa", Full()), new=30)
    assert sparse.new_tokens != full.new_tokens
    assert 0.05 < sparse.stats().fetched_fraction < 0.2


def test_the_mean_count_couples_a_batch_only_in_its_counts():
    policy = dataclasses.replace(SPARSE, count="mean", alpha=1.0)
    run = finished(engine("gqa", policy))
    heads = 2 * 2  # host layers times KV heads
    assert (
        counts_of(run) <= heads * 0.2 * (run.prompt_lengths + np.arange(NEW - 1)[:, None])
    ).all()


# Settings.


def test_the_paper_form_without_window_and_sinks():
    paper = InfiniGen(alpha=float("inf"), budget=1.0, window=1, sinks=0, partial_ratio=0.3)
    run = finished(engine("gqa", paper))
    assert run.new_tokens == finished(engine("gqa", Full())).new_tokens
    # L - 2 layers are speculated; step i fetches all of prompt + i - 1 tokens for each.
    tokens = run.prompt_lengths + np.arange(NEW - 1)[:, None]
    np.testing.assert_array_equal(counts_of(run), tokens * 2 * 2)
    assert run.stats().fetched_fraction == 1.0


def test_alpha_zero_fetches_nothing():
    run = finished(engine("gqa", dataclasses.replace(SPARSE, alpha=0.0)))
    assert counts_of(run).sum() == 0 and run.stats().fetched_fraction == 0


def test_larger_alpha_and_budget_fetch_more():
    prompts = RAGGED[:1]
    fractions = [
        finished(engine("gqa", dataclasses.replace(SPARSE, **s)), prompts, 2).stats()
        for s in ({"alpha": 0.3}, {"alpha": 9.0, "budget": 0.5})
    ]
    values = [stats.fetched_fraction for stats in fractions]
    assert 0 < values[0] < values[1] <= 0.5


def test_windows_longer_than_the_cache():
    """Everything stays on the device; nothing is eligible, nothing overflows."""
    wide = dataclasses.replace(SPARSE, window=300)
    run = finished(engine("gqa", wide))
    assert counts_of(run).sum() == 0
    assert run.new_tokens == finished(engine("gqa", Full())).new_tokens


def test_full_with_a_window_streams_only_older_rows():
    assert tokens_of(engine("gqa", Full(window=5, sinks=2))) == tokens_of(engine("gqa", Full()))


def test_caches_of_several_stream_blocks(monkeypatch):
    from infinigen_jax import decode

    full = finished(engine("gqa", Full()))
    monkeypatch.setattr(decode, "STREAM_BLOCK", 32)
    blocks = Engine(random_model("gqa"), policy=Full(window=3))  # another policy: compiled anew
    assert finished(blocks).new_tokens == full.new_tokens


@pytest.mark.parametrize("schedule", ["fused", "layerwise"])
def test_bfloat16(schedule):
    model = random_model("gqa", "bfloat16")
    run = finished(Engine(model, policy=SPARSE, schedule=schedule))
    assert run.cache.host is not None and run.cache.host.dtype == jnp.bfloat16
    assert [len(tokens) for tokens in run.new_tokens] == [NEW] * 3
    assert all(0 <= token < 96 for tokens in run.new_tokens for token in tokens)


def test_dense_layers_beyond_the_model_are_all_layers():
    assert engine("gqa", SPARSE, 99).decoder.dense_layers == 4


# Ends.


def test_end_of_text_ends_its_row_and_no_other():
    free = finished(engine("gqa")).new_tokens
    eos = free[1][4]  # what the second prompt's fifth token will be
    model = random_model("gqa")
    ends = dataclasses.replace(model, config=dataclasses.replace(model.config, eos_ids=(eos,)))
    stopping = Engine(ends, policy=SPARSE)
    got = stopping.generate(RAGGED, max_new_tokens=NEW)
    for tokens, all_tokens in zip(got.tokens, free, strict=True):
        length = all_tokens.index(eos) + 1 if eos in all_tokens else NEW
        assert tokens == all_tokens[:length]
    assert len(got.tokens[1]) <= 5
    assert got.stats.new_tokens == sum(map(len, got.tokens))
    assert tokens_of(stopping, ignore_eos=True) == free
    steps = list(stopping.stream(RAGGED, max_new_tokens=NEW))
    column = [step.tokens[1] for step in steps]
    assert column[: len(got.tokens[1])] == got.tokens[1]
    assert set(column[len(got.tokens[1]) :]) <= {None}
    single = list(stopping.stream([RAGGED[1]], max_new_tokens=NEW))
    assert len(single) == len(got.tokens[1])


def test_a_single_new_token():
    for schedule in ("fused", "layerwise"):
        got = engine("gqa", schedule=schedule).generate(RAGGED, max_new_tokens=1, ignore_eos=True)
        assert got.tokens == [tokens[:1] for tokens in finished(engine("gqa")).new_tokens]
        assert got.stats.fetched_fraction == 0 and got.stats.new_tokens == 3


def test_single_tokens_are_prompts():
    assert tokens_of(engine("gqa", ALL), [[7]]) == tokens_of(engine("gqa", Full()), [[7]])


def test_sampling_repeats_with_its_seed():
    drawn = [
        tokens_of(engine("gqa"), sampling=Sampling(temperature=1.0, top_k=20, seed=seed))
        for seed in (3, 3, 4)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    layerwise = engine("gqa", schedule="layerwise")
    assert tokens_of(layerwise, sampling=Sampling(temperature=1.0, top_k=20, seed=3)) == drawn[0]


# Accounts.


@pytest.mark.parametrize("schedule", ["fused", "layerwise"])
def test_bytes_and_fractions(schedule):
    full = finished(engine("gqa", Full(), 2, schedule)).stats()
    assert full.fetched_fraction == 1.0
    run = finished(engine("gqa", SPARSE, 2, schedule))
    stats = run.stats()
    assert 0 < stats.fetched_fraction <= SPARSE.budget
    layers, heads, d, capacity = 2, 2, 8, run.capacity
    assert capacity == 128
    row = 2 * d * 4
    assert stats.host_cache_bytes == layers * 3 * heads * capacity * row
    assert run.cache.host is not None and run.cache.host.nbytes == stats.host_cache_bytes
    assert stats.host_to_device_bytes_per_token == layers * heads * 25 * row  # 25 = 0.2 * 128
    assert full.host_to_device_bytes_per_token == layers * heads * capacity * row
    assert stats.device_index_bytes == sum(x.nbytes for x in jax.tree.leaves(run.cache.states))
    assert stats.device_index_bytes == layers * 3 * heads * capacity * 4 * 4  # half the columns
    assert (stats.prompt_tokens, stats.new_tokens) == (sum(map(len, RAGGED)), 3 * NEW)
    assert (stats.policy, stats.schedule, stats.transfer) == ("infinigen", schedule, "xla")


def test_the_plan_is_what_is_allocated():
    run = finished(engine("gqa", SPARSE, 1))
    local = run.cache.local
    dense = sum(x.nbytes for x in jax.tree.leaves([p for p in local if isinstance(p, DenseLayer)]))
    ring = [p for p in local if not isinstance(p, DenseLayer)]
    assert run.plan.dense_cache == dense
    assert run.plan.resident == sum(x.nbytes for x in jax.tree.leaves(ring))


@pytest.mark.parametrize("schedule", ["fused", "layerwise"])
@pytest.mark.parametrize("policy", [SPARSE, Full()], ids=["infinigen", "full"])
def test_memory_kinds_and_buffers(policy, schedule):
    run = engine("gqa", policy, 1, schedule).start(RAGGED, NEW)
    assert run.cache.host is not None
    address = run.cache.host.unsafe_buffer_pointer()
    for _ in range(NEW - 1):
        run.advance()
        assert run.cache.host.sharding.memory_kind == "pinned_host"
        rest = (run.cache.states, run.cache.local, run.cache.lengths)
        assert {x.sharding.memory_kind for x in jax.tree.leaves(rest)} == {"device"}
    assert run.cache.host.unsafe_buffer_pointer() == address
    assert run.cache.lengths.tolist() == [len(p) + NEW - 1 for p in RAGGED]


# What a step must not do.


@pytest.mark.parametrize("schedule", ["fused", "layerwise"])
@pytest.mark.parametrize("policy", [SPARSE, Full()], ids=["infinigen", "full"])
def test_no_compilation_after_warm_up(policy, schedule):
    made = engine("gqa", policy, 2, schedule)
    first = finished(made)
    assert first.stats().compilations_after_warmup == 0
    before = compilations()
    again = finished(made)
    assert compilations() == before
    assert again.new_tokens == first.new_tokens
    finished(made, [prompt[:-1] for prompt in RAGGED], NEW + 2)  # same padded lengths
    assert compilations() == before


@pytest.mark.parametrize("schedule", ["fused", "layerwise"])
def test_a_step_neither_reads_nor_sends_anything(schedule, monkeypatch):
    run = engine("gqa", SPARSE, 2, schedule).start(RAGGED, NEW)
    run.advance()

    def refuse(*arguments, **keywords):
        raise AssertionError("a step reads an array's value")

    # On the CPU the guard does not see reads, which are views there.
    array = type(run.drawn)
    for name in ("__array__", "__int__", "__float__", "__bool__", "__index__", "item", "tolist"):
        monkeypatch.setattr(array, name, refuse)
    monkeypatch.setattr(array, "block_until_ready", refuse)
    with jax.transfer_guard("disallow"):
        for _ in range(2 * SPARSE.window):
            run.advance()


def copies(hlo: str) -> list[int]:
    """Elements of each array that a compiled program copies."""
    shapes = re.findall(r"= \w+\[([\d,]*)\][^ ]* copy(?:-start)?\(", hlo)
    return [int(np.prod([int(n) for n in shape.split(",") if n] or [1])) for shape in shapes]


def compiled_fused(run: Run) -> str:
    cache, made = run.cache, run.engine
    arguments = (cache.host, cache.states, cache.local, cache.lengths, run.drawn)
    lowered = run._steps.fused.lower(
        made.weights, *arguments, run._seed, run._step, sampling=run._sampling
    )
    return lowered.compile().as_text()


@pytest.mark.parametrize("policy", [SPARSE, Full()], ids=["infinigen", "full"])
def test_the_fused_step_copies_neither_cache_nor_weights(policy):
    run = engine("gqa", policy).start(RAGGED, NEW)
    assert run.cache.host is not None
    largest = max(x.size for x in jax.tree.leaves(run.engine.model.params["layers"][0]))
    hlo = compiled_fused(run)
    assert max(copies(hlo), default=0) < min(run.cache.host[0].size, largest)
    assert "callback" not in hlo


def test_the_layerwise_step_and_the_flush_copy_no_cache():
    run = engine("gqa", SPARSE, 2, "layerwise").start(RAGGED, NEW)
    cache, weights, at = run.cache, run.engine.weights, run._numbers
    assert cache.host is not None
    layers = weights.params["layers"]
    carry = run._steps.embed(weights.params["embedding"], run.drawn, cache.lengths)
    ahead = [run.decoder.following(weights, cache, i, at[i]) for i in range(2)]
    arguments = (layers[1], carry, cache.local[1], cache.host, None, ahead[0], cache.lengths)
    dense = run._steps.fetching_layer.lower(*arguments).compile().as_text()
    carry, _ = run._steps.fetching_layer(*arguments)
    sparse = (layers[2], carry, cache.local[2], cache.host, at[0], ahead[1], cache.lengths)
    flush = (weights.policy, cache.local, cache.host, cache.states, cache.lengths)
    programs = {
        "dense": dense,
        "sparse": run._steps.fetching_layer.lower(*sparse).compile().as_text(),
    }
    for name, hlo in programs.items():
        assert max(copies(hlo), default=0) < cache.host[0].size, name
    local = run.engine.start(RAGGED, NEW).cache.local  # what was donated above is gone
    flushed = run._steps.flush.lower(flush[0], local, *flush[2:]).compile().as_text()
    assert max(copies(flushed), default=0) < cache.host[0].size


# What is refused.


def test_settings_and_prompts_out_of_range():
    model = random_model("gqa")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"dense_layers": -1}, "--dense-layers"),
        ({"schedule": "eager"}, "--schedule"),
        ({"transfer": "pigeon"}, "--transfer"),
    ]
    for settings, named in wrong:
        with pytest.raises(InputError, match=named):
            Engine(model, **settings)
    made = engine("gqa")
    for prompts, new, named in (
        ([], 4, "--prompt"),
        ([[]], 4, "--prompt"),
        ([[96]], 4, "--prompt"),
        ([[-1]], 4, "--prompt"),
        ([""], 4, "--prompt"),
        (["text"], 4, "tokenizer"),
        ([[5]], 0, "--max-new-tokens"),
        ([[5] * 250], 7, "250 tokens leaves room for 6"),
    ):
        with pytest.raises(InputError, match=named):
            made.generate(prompts, max_new_tokens=new)
    assert len(tokens_of(made, [[5] * 250], 6, ignore_eos=True)[0]) == 6


def test_more_memory_than_there_is(monkeypatch):
    made = engine("gqa")
    monkeypatch.setattr(planning, "available_host_bytes", lambda: 50_000)
    with pytest.raises(InputError, match=r"needs .* KiB of host memory .* 48.8 KiB are available"):
        made.start(RAGGED, NEW)


def test_models_without_end_tokens_go_on():
    model = without_eos(random_model("mqa"))
    assert len(tokens_of(Engine(model, policy=SPARSE), RAGGED[:1], 5)[0]) == 5


def test_text_of_a_stream_is_that_of_its_tokens():
    """Also where a token ends within a character, in a row that ends before the others."""
    model = load(embedded())
    made = Engine(model, policy=SPARSE)
    prompts = ["The", "When the old man saw"]
    steps = list(made.stream(prompts, Sampling(temperature=2.0, seed=1), 20, ignore_eos=True))
    texts = ["".join(step.texts[i] for step in steps) for i in range(2)]
    got = made.generate(prompts, Sampling(temperature=2.0, seed=1), 20, ignore_eos=True)
    assert texts == got.texts
    for text, tokens in zip(got.texts, got.tokens, strict=True):
        assert text == model.tokenizer.decode(tokens, skip_special_tokens=True)
