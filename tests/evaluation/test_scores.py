"""The parts of an evaluation: scores of windows, statistics of them, and texts."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runtime import SPARSE, engine, random_model, score
from tiny import refuses, text_log_probs
from transformers import AutoTokenizer

from infinigen_jax import Engine, Full, InfiniGenPaper, embedded
from infinigen_jax.evaluation.answers import answer
from infinigen_jax.evaluation.perplexity import divergence, statistics
from infinigen_jax.evaluation.recall import study_windows
from infinigen_jax.evaluation.scoring import score_windows
from infinigen_jax.evaluation.texts import Text, cut, tokenize

CONTEXT = 12
WINDOWS = np.random.default_rng(3).integers(3, 96, (5, 40)).astype(np.int32)


@pytest.mark.parametrize("name", ["one", pytest.param("opt", marks=pytest.mark.slow)])
def test_full_cache_scores_equal_the_plain_forward_pass(name):
    (nats, *_), traffic = score_windows(engine(name, Full()), WINDOWS, CONTEXT, batch=2)
    expected = -text_log_probs(random_model(name), WINDOWS)[:, CONTEXT - 1 :]
    assert nats.shape == expected.shape == (5, 28) and nats.dtype == np.float64
    assert nats.mean() == pytest.approx(expected.mean(), rel=1e-5)
    # A token's is a difference of logits of the order of 100 in float32.
    np.testing.assert_allclose(nats, expected, atol=2e-4)
    assert traffic.tokens == 5 * 28 and traffic.selected == traffic.fetched == traffic.tokens


def test_tokens_that_are_asked_for():
    """All of them in another order, the likeliest few, and the text's own."""
    chosen, tokens = engine("one", SPARSE), np.arange(96, dtype=np.int32)[::-1]
    asked = np.broadcast_to(tokens, (5, 28, 96))
    every, _ = score_windows(chosen, WINDOWS, CONTEXT, batch=2, asked=asked)
    assert (every.tokens == asked).all() and every.log_probs.shape == asked.shape
    np.testing.assert_allclose(np.exp(every.log_probs).sum(axis=-1), 1, rtol=1e-5)
    text = 95 - WINDOWS[:, CONTEXT:]
    targets = np.take_along_axis(every.log_probs, text[..., None], axis=-1)[..., 0]
    np.testing.assert_array_equal(targets, -every.nats)
    more, _ = score_windows(chosen, WINDOWS, CONTEXT, batch=2, asked=128)
    assert more.tokens.shape == asked.shape, "no more than there are"
    best, _ = score_windows(chosen, WINDOWS, CONTEXT, batch=2, asked=3)
    order = np.argsort(-every.log_probs, axis=-1, kind="stable")[..., :3]
    np.testing.assert_array_equal(best.tokens, 95 - order)
    np.testing.assert_array_equal(best.log_probs, -np.sort(-every.log_probs, axis=-1)[..., :3])
    assert (best.best == best.tokens[..., 0]).all() and (every.best == best.best).all()


@pytest.mark.parametrize("policy", [SPARSE, Full()], ids=["selected", "streamed"])
def test_scores_and_traffic_are_those_of_runs(policy):
    """A window that fills up the last batch is not counted."""
    chosen, nats, selected, rows = engine("one", policy), [], 0, 0
    scores, traffic = score_windows(chosen, WINDOWS[:3], CONTEXT, batch=2)
    for pair, kept in (([0, 1], 2), ([2, 0], 1)):
        windows = WINDOWS[pair]
        run = chosen.start(windows[:, : CONTEXT - 1].tolist(), max_new_tokens=28)
        steps = range(CONTEXT - 1, 39)
        found = [score(run, windows[:, i], windows[:, i + 1])[:kept] for i in steps]
        nats.append(-np.stack(found, axis=1))
        selected += sum(int(counts.selected[:kept].sum()) for counts in run.counts)
        rows += sum(int(counts.moved[:kept].sum()) for counts in run.counts)
    np.testing.assert_allclose(scores.nats, np.concatenate(nats), rtol=1e-5, atol=1e-5)
    decoder = run.decoder
    assert traffic.tokens == 3 * 28 and traffic.selected_rows == selected
    assert traffic.host_cache_bytes == run.plan.host_cache
    assert traffic.device_index_bytes == run.plan.index
    if policy is not SPARSE:  # streamed up to the cache's end
        heads = decoder.config.num_kv_heads
        rows = traffic.tokens * heads * decoder.host_layers * run.slots
    assert traffic.moved_bytes == rows * 2 * decoder.config.head_dim * 4


def test_what_is_attended_is_of_layers_that_select():
    assert InfiniGenPaper().streamed_layers == 2
    paper = InfiniGenPaper(budget=0.2, alpha=math.inf, streamed_layers=1)
    _, traffic = score_windows(engine("gqa", paper, None), WINDOWS[:2], CONTEXT, batch=2)
    expected = np.mean([int(0.2 * n) / n for n in range(CONTEXT - 1, 39)])
    assert traffic.attended / traffic.tokens == pytest.approx(expected)
    assert traffic.selected / traffic.tokens == pytest.approx((1 + expected) / 2)
    _, traffic = score_windows(engine("one", SPARSE), WINDOWS[:2], CONTEXT, batch=2)
    # Rows on the device: sinks and window of SPARSE, without the current token.
    resident = np.mean([(2 + 4 - 1) / n for n in range(CONTEXT - 1, 39)])
    assert traffic.attended == pytest.approx(traffic.selected + resident * traffic.tokens)


def test_a_model_that_gives_no_numbers():
    model = random_model("one")
    filled = jax.tree.map(lambda x: jnp.full_like(x, math.nan), model.params["embedding"])
    broken = dataclasses.replace(model, params=model.params | {"embedding": filled})
    made, settings = Engine(broken, policy=SPARSE), {"context": CONTEXT, "chunk": 8, "batch": 2}
    measures: list[Callable[[], Any]] = [
        lambda: score_windows(made, WINDOWS, CONTEXT, batch=2),
        lambda: study_windows(made, WINDOWS, settings),
        lambda: answer(made, WINDOWS.tolist(), 1, 2, 2),
    ]
    for measure in measures:
        refuses("not finite", measure)


def test_chunks_combine_to_the_whole():
    rng = np.random.default_rng(0)
    full = rng.exponential(3, (7, 50))
    nats = full + rng.normal(0.01, 0.1, full.shape)
    divergences, same = rng.exponential(0.1, full.shape), rng.integers(0, 2, full.shape)
    arrays = {"nats": nats, "change": nats - full, "divergence": divergences, "same": same * 1.0}
    result = statistics(arrays, context=20, chunk=16)
    chunks = result["chunks"]
    assert [(c["from"], c["to"]) for c in chunks] == [(20, 36), (36, 52), (52, 68), (68, 70)]
    assert sum(c["tokens"] for c in chunks) == result["tokens"] == 350
    for name in ("nats_per_token", "difference_nats", "divergence_nats", "same_best_fraction"):
        total = sum(c[name] * c["tokens"] for c in chunks)
        assert total / 350 == pytest.approx(result[name])
    assert chunks[1]["perplexity"] == pytest.approx(np.exp(nats[:, 16:32].mean()))


def test_differences_are_paired():
    full = np.random.default_rng(0).exponential(3, (6, 40))
    shift = np.linspace(0.01, 0.03, 6)[:, None]
    change = np.broadcast_to(shift, full.shape)
    arrays = {"nats": full + shift, "change": change, "divergence": 0 * full, "same": full**0}
    result = statistics(arrays, context=2, chunk=256)
    assert result["divergence_nats"] == 0 and result["same_best_fraction"] == 1
    assert result["difference_nats"] == pytest.approx(0.02)
    expected = np.std(shift, ddof=1) / np.sqrt(6)
    assert result["difference_standard_error"] == pytest.approx(expected)
    assert result["standard_error"] > 10 * expected
    assert result["perplexity_change_percent"] == pytest.approx(100 * math.expm1(0.02))
    alone = statistics({"nats": full[:1]}, context=2, chunk=256)
    assert alone["standard_error"] is None and alone["difference_nats"] is None
    assert statistics({"nats": full + 1000}, 2, 256)["perplexity"] is None  # overflow, not infinity


def test_windows_are_counted_and_spread():
    tokens = np.arange(100, dtype=np.int32)
    windows = cut((1,), tokens, 11)
    assert windows.shape == (10, 11) and windows.dtype == np.int32
    assert (windows[:, 0] == 1).all() and (windows[:, 1:].ravel() == np.arange(100)).all()
    assert cut((1,), tokens, 11, 4)[:, 1].tolist() == [0, 20, 50, 70]
    assert cut((1,), tokens, 11, 99).shape == (10, 11) and cut((1,), tokens, 12).shape == (9, 12)
    assert cut((), tokens, 10).shape == (10, 10)
    refuses("only 101 tokens; lower it to at most 101", cut, (1,), tokens, 102)
    refuses("only 2 tokens; give a longer `text`", cut, (1,), np.zeros(1, np.int32), 3)


def test_text_with_a_mark_and_odd_characters(tmp_path):
    """Lines end in one way, also those of a file that was converted twice."""
    file = tmp_path / "text.txt"
    odd = "Caf\u00e9 \U0001f30a \x00\u200b \ufffd\n\ttabs\n"
    file.write_bytes(b"\xef\xbb\xbfa\r\nb\r\r\nc\rd\n\r\n" + odd.replace("\n", "\r\n").encode())
    text = Text.read(str(file))
    assert text.content == "a\nb\nc\nd\n\n" + odd
    assert text.name == "text.txt" and len(text.sha256) == 64
    tokenizer = AutoTokenizer.from_pretrained(str(embedded()))
    prefix, tokens = tokenize(text, tokenizer, 1024)
    assert tokenizer.decode(tokens.tolist()) == text.content
    # As a prompt of the generate command.
    assert [*prefix, *tokens.tolist()] == tokenizer.encode(text.content)
    refuses("not among the model.s 5 tokens; use its own tokenizer", tokenize, text, tokenizer, 5)


def distributions(spread: float, tokens: int = 50) -> tuple[np.ndarray, np.ndarray]:
    """Return log-probabilities [3, 4, tokens], the likeliest first, and those of a similar one."""
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 3, (3, 4, tokens))
    both = np.stack([logits, logits + rng.normal(0, spread, logits.shape)])
    both -= np.log(np.exp(both).sum(axis=-1, keepdims=True))
    order = np.argsort(-both[0], axis=-1)
    p, q = (np.take_along_axis(x, order, axis=-1).astype(np.float32) for x in both)
    return p, q


@pytest.mark.parametrize("spread", [1e-3, 0.1, 3.0])
def test_divergence(spread):
    p, q = distributions(spread)
    exact = np.sum(np.exp(p.astype(np.float64)) * (p.astype(np.float64) - q), axis=-1)
    np.testing.assert_allclose(divergence(p, q), exact, rtol=1e-3, atol=1e-6)
    assert (divergence(p, p) == 0).all()
    # Of fewer tokens it is less, and of none nothing.
    parts = [divergence(p[..., :n], q[..., :n]) for n in (50, 20, 5, 0)]
    for more, fewer in zip(parts, parts[1:], strict=False):
        assert (fewer <= more + 1e-6).all() and (fewer >= 0).all()
    assert (parts[-1] == 0).all()
    assert parts[1].mean() > 0.5 * parts[0].mean()


def test_divergence_where_a_likely_token_became_impossible():
    p = np.log(np.array([[0.5, 0.25]], np.float32))
    q = np.array([[math.log(0.75), -1e4]], np.float32)
    assert divergence(p, q) == pytest.approx(0.25 * 1e4, rel=1e-3)
    assert divergence(q, p) == pytest.approx(0.75 * math.log(1.5), rel=1e-3)
