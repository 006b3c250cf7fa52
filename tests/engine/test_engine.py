"""The engine: its settings, and how generations end."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from runtime import (
    NEW,
    RAGGED,
    SPARSE,
    counts_of,
    finished,
    numbers,
    random_model,
    tokens_of,
    with_ends,
)
from tiny import refuses

from infinigen_jax import Engine, Pool, Sampling, embedded
from infinigen_jax.policies import Full, InfiniGen, Policy
from infinigen_jax.text.tokenizer import load_tokenizer

LAYER = random_model("one")

# Settings, each on a model of one layer, whose rows are on the host.


def small(policy: Policy = SPARSE, *, schedule: str = "fused", **settings: Any) -> Engine:
    return Engine(LAYER, policy=policy, dense_layers=0, schedule=schedule, **settings)


def test_all_layers_may_be_dense():
    run = finished(Engine(LAYER, policy=SPARSE, dense_layers=99))
    assert run.decoder.dense_layers == 1
    assert run.cache.host is None and run.stats().fetched_fraction == 0
    streamed, config = finished(small(Full())), LAYER.config
    assert run.new_tokens == streamed.new_tokens
    row = 2 * config.head_dim * 4
    read = config.num_kv_heads * streamed.capacity * row
    assert streamed.stats().host_to_device_bytes_per_token == read


def test_windows_longer_than_the_cache():
    """Everything stays on the device; nothing is eligible, nothing overflows."""
    wide = dataclasses.replace(SPARSE, window=300)
    run = finished(small(wide))
    assert counts_of(run).sum() == 0
    assert run.new_tokens == finished(small(Full())).new_tokens


def test_caches_of_several_stream_blocks(monkeypatch):
    prompts = [numbers(110), numbers(90)]
    full = finished(small(Full()), prompts)
    for module in ("decode.layer_rows", "engine.batch"):
        # The last begins before the second's end.
        monkeypatch.setattr(f"infinigen_jax.{module}.STREAM_BLOCK", 48)
    blocks = small(Full(window=3))  # another policy, compiled again
    assert finished(blocks, prompts).new_tokens == full.new_tokens
    assert finished(blocks, prompts, batch=1).new_tokens == full.new_tokens


def test_end_of_text_ends_its_row_and_no_other():
    free = finished(small()).new_tokens
    eos = free[1][4]  # the fifth token of the second prompt
    stopping = with_ends(small(), eos)
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


def test_settings_and_prompts_out_of_range():
    verified: dict[str, Any] = {"policy": SPARSE, "dense_layers": 0, "lossless": True}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"dense_layers": -1}, "dense_layers"),
        ({"schedule": "eager"}, "schedule"),
        ({"transfer": "pigeon"}, "transfer"),
        ({"weights": "disk"}, "weights disk"),
        (verified | {"policy": Full()}, "lossless: policy full"),
        (verified | {"pool": Pool(tokens=40)}, "pool"),
        (verified | {"rows": "int8", "policy": InfiniGen(window=1)}, "lossless: `rows` int8"),
        ({"draft_tokens": 3}, "draft_tokens: nothing is drafted"),
        ({"draft_weights": "int4"}, "draft_weights: nothing is drafted"),
        ({"pool": 100}, r"pool 100: give Pool\(tokens=4096\)"),
        *(({"hot_set": size}, "hot_set") for size in (0.5, -1.0, float("nan"))),
        ({"hot_set": 1e308}, "hot_set .* at most"),
    ]
    for settings, named in wrong:
        refuses(named, Engine, LAYER, **settings)
    made = small()
    refused: list[tuple[Any, int, str]] = [
        ([], 4, "prompts"),
        ([[]], 4, "prompts"),
        ([[96]], 4, "prompts"),
        ([[-1]], 4, "prompts"),
        ([""], 4, "prompts"),
        (["text"], 4, "tokenizer"),
        ([[5]], 0, "max_new_tokens"),
        ([[5] * 250], 7, "250 tokens leaves room for 6"),
        ([[5.5]], 4, "a token is a whole number"),
        (b"abc", 4, "not bytes"),
        ([True], 4, "not bool"),
        (None, 4, "not NoneType"),
        ({5: 6}, 4, "encode_chat"),
        ([{"role": "user", "content": "x"}], 4, "encode_chat"),
        ((token for token in [5]), 4, "not generator"),
        ([5, [6]], 4, "a token is a whole number"),
        ([[5] * 256], 1, "the prompt has 256 tokens, which is too long: the model has 256"),
        ([[5], [5] * 256], 1, "prompt 2 of 2 has 256 tokens"),
        ([[5]], 10**23, "max_new_tokens .* at most"),
    ]
    for prompts, new, named in refused:
        for begin in (made.generate, made.start):
            refuses(named, begin, prompts, max_new_tokens=new)
    assert len(tokens_of(made, [[5] * 250], 6, ignore_eos=True)[0]) == 6
    refuses("sampling: 512 is not a Sampling", made.conversation, 512)


def test_other_arguments_that_cannot_be_are_refused():
    made: Any = small()
    stop: list[Any] = [None, 5, b"a", [""]]
    for wrong in stop:
        refuses("stop", made.generate, [5], stop=wrong)
    for wrong in (None, 5, True, b"ab", np.array(5)):
        refuses("prefix", made.generate, [[5]], prefix=wrong)
    refuses("prefix", made.start, [[5, 6]], prefix=-3)
    refuses("batch .* at most", made.generate, [[5]], batch=10**23)
    for wrong in ("99", 1.5, 1, 1000):
        refuses("context", made.conversation, context=wrong)
    refuses("bytes are no prompt", list, made.conversation().turn(b"a"))
    refuses(r"budget.* InfiniGen\(budget=0.1\)", Engine, LAYER, budget=0.1)


def test_numbers_of_numpy_are_settings(tmp_path):
    single: Any = np.float32
    whole: Any = np.int64
    sampling = Sampling(temperature=single(0.5), seed=whole(3))
    policy = dataclasses.replace(SPARSE, alpha=single(4), window=whole(4))
    talk = small(policy).conversation(sampling, context=whole(64))
    list(talk.turn([5] * 20, 3, ignore_eos=True))
    talk.save(tmp_path / "talk")
    assert talk.sampling == Sampling(temperature=0.5, seed=3)


def test_a_run_takes_given_tokens_of_its_sequences_until_one_ends():
    run: Any = small().start(RAGGED, max_new_tokens=4)
    wrong: list[Any] = [[5], [5, 6, 96], [5, 6, -1], np.ones((3, 1), np.int32)]
    for tokens in wrong:
        refuses("token", run.predict, tokens)
    assert np.isfinite(np.asarray(run.predict([5, 6, 7]))).all()
    steps = run.tokens(ignore_eos=True)
    next(steps)
    refuses("taken once", next, run.tokens())
    list(steps)
    refuses("has ended", run.predict, [5, 6, 7])


def test_arrays_are_prompts():
    made, expected = small(), tokens_of(small(), [[5, 6, 7]])
    one = np.array([5, 6, 7])
    for prompts in (one, jnp.array(one), [one], one[None], list(one), [list(one)], ((5, 6, 7),)):
        assert tokens_of(made, prompts) == expected


def test_texts_of_a_stream():
    """They are those of its tokens, up to a stop string that ends one prompt and not the others."""
    model = dataclasses.replace(LAYER, given_tokenizer=load_tokenizer(embedded()))
    made = Engine(model, policy=Full(), dense_layers=0)
    assert len(made.start("zz", max_new_tokens=1).new_tokens) == 1  # as in `stream`
    given = RAGGED, Sampling(temperature=2.0, seed=1), 20
    whole = made.generate(*given, ignore_eos=True)
    for text, tokens in zip(whole.texts, whole.tokens, strict=True):
        assert text == model.tokenizer.decode(tokens, skip_special_tokens=True)

    def streamed(**options: Any) -> tuple[list[Any], list[str]]:
        steps = list(made.stream(*given, ignore_eos=True, **options))
        return steps, ["".join(step.texts[i] for step in steps) for i in range(3)]

    assert streamed()[1] == whole.texts
    stop = whole.texts[1][10:13]
    assert stop not in whole.texts[0] + whole.texts[2]
    steps, texts = streamed(stop=stop)
    assert texts == [whole.texts[0], whole.texts[1].split(stop)[0], whole.texts[2]]
    ended = [step.tokens[1] is None for step in steps].index(True)
    assert 1 < ended < 20 and all(step.tokens[1] is None for step in steps[ended:])
