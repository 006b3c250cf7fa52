"""The recipe of the reference models: its data, its schedule, its state, and what it writes."""

import dataclasses
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.reference_models import train
from benchmarks.reference_models.batches import Batches, passage, windows
from benchmarks.reference_models.books import plain, read_books, with_broken_lines
from benchmarks.reference_models.corpus import Corpus, open_corpus, prepare
from benchmarks.reference_models.export import export
from benchmarks.reference_models.model import Training, attention, initial_params, token_losses
from benchmarks.reference_models.recipes import BOS, EOS, SIZES, Stage, hf_config
from benchmarks.reference_models.schedule import FLOOR, Clock, learning_rate
from benchmarks.reference_models.synthetic import KINDS, SHORTEST, Synthetic
from benchmarks.reference_models.training import Settings, _Job
from benchmarks.reference_models.training import train as run_training
from infinigen_jax.errors import InputError
from infinigen_jax.loading.load import load
from infinigen_jax.models import blueprint, config_from_hf
from infinigen_jax.models.forward import forward

SMOKE = SIZES["smoke"]
WORDS = "the old man went down to a quiet harbour and she said nothing of it all day long".split()


def book(seed: int) -> str:
    rng = np.random.default_rng(seed)
    lines = [" ".join(rng.choice(WORDS, 12)) + "." for _ in range(60)]
    return f"# Title: {seed}\n\n## Author: A\n\n## Year: 1900\n\n-------\n" + "\r\n\r\n".join(lines)


def archive(path: Path, books: dict[str, str]) -> None:
    with tarfile.open(path, "w:xz") as file:
        for name, text in books.items():
            data = text.encode()
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("books")
    archive(folder / "books_train_0.tar.xz", {f"A/{i}.md": book(i) for i in range(4)})
    archive(folder / "books_train_1.tar.xz", {"A/4.md": book(4), "A/notes.txt": "no book"})
    archive(folder / "books_val.tar.xz", {"B/9.md": book(9)})
    return folder


@pytest.fixture(scope="module")
def data(books: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus") / "data"
    prepare(books, folder, SMOKE, None)
    return folder


@pytest.fixture(scope="module")
def corpus(data: Path) -> Corpus:
    return open_corpus(data)


def settings(**changed: Any) -> Settings:
    given: dict[str, Any] = {
        "size_name": "smoke",
        "tokens": SMOKE.tokens,
        "learning_rate": SMOKE.learning_rate,
        "synthetic": SMOKE.synthetic,
    }
    return Settings(**(given | changed))


@pytest.fixture(scope="module")
def trained(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a whole training."""
    out = tmp_path_factory.mktemp("trained")
    assert run_training(settings(), corpus, out, resume=False)
    return out


def test_a_book_becomes_plain_text() -> None:
    markdown = "# Title: X\n\n-------\n\ntext\r\n\r\n\r\n\r\n### II\r\n"
    markdown += "\u201cNo\u2014it\u2019s _mine_,\u201d\u2026  \r\n she *said* \\#1."
    assert plain(markdown) == 'text\n\nII\n"No--it\'s mine,"...\n she said 1.'


def test_books_are_read_in_order_and_cut(books: Path) -> None:
    found = list(read_books(sorted(books.glob("books_train_*")), 100))
    assert [b.name for b in found] == [f"A/{i}.md" for i in range(5)]
    assert all(len(b.text) == 100 and "\r" not in b.text for b in found)
    assert "Title" not in found[0].text


def test_the_corpus_holds_the_books_between_marks(books: Path, corpus: Corpus) -> None:
    expected = list(read_books(sorted(books.glob("books_train_*")), SMOKE.characters_per_book))
    split = corpus.train
    assert split.tokens.dtype == np.uint16
    assert len(split.starts) == len(expected) + 1
    for text, start, end in zip(expected, split.starts, split.starts[1:], strict=False):
        ids = split.tokens[start:end].tolist()
        assert (ids[0], ids[-1]) == (BOS, EOS)
        assert corpus.tokenizer.decode(ids[1:-1]).split() == text.text.split()
    assert split.characters == sum(len(b.text) for b in expected)  # a broken line is as long
    assert corpus.tokenizer.get_vocab_size() <= SMOKE.vocabulary


def test_a_tokenizer_can_be_reused(books: Path, data: Path, tmp_path: Path) -> None:
    prepare(books, tmp_path / "again", SMOKE, data)
    again = open_corpus(tmp_path / "again")
    assert again.tokenizer_json == open_corpus(data).tokenizer_json
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer\.json: cannot be read"):
        prepare(books, tmp_path / "other", SMOKE, tmp_path)
    assert not (tmp_path / "other").exists()


def test_passages_and_windows_lie_where_they_should(corpus: Corpus) -> None:
    split = corpus.train
    shortest = int(np.diff(split.starts).min())
    for seed in range(50):
        found = passage(split, np.random.default_rng(seed), min(100, shortest))
        assert not np.any(found[:-1] == EOS)  # no end of a book before its end
    cut = windows(corpus.val, 64, 5)
    assert cut.shape == (5, 64)
    np.testing.assert_array_equal(cut[0], corpus.val.tokens[:64])
    np.testing.assert_array_equal(cut[-1], corpus.val.tokens[-64:])


def test_a_batch_depends_on_seed_step_and_stage_alone(corpus: Corpus) -> None:
    first, _, second = SMOKE.stages
    batches = Batches(corpus, SMOKE, seed=3)
    try:
        in_order = [batches.get(step, first) for step in range(3)]
        switched = batches.get(3, second)
        alone = [batches.make(step, first) for step in (2, 0, 1)]
    finally:
        batches.close()
    for a, b in zip([in_order[i] for i in (2, 0, 1)], alone, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)
    assert switched.tokens.shape == (second.batch, second.context + 1)
    assert not np.array_equal(in_order[0].tokens, in_order[1].tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_synthetic_answers_are_what_their_facts_say(corpus: Corpus, kind: str) -> None:
    tokenizer = corpus.tokenizer
    make = Synthetic(tokenizer, lambda rng, n: passage(corpus.train, rng, n), 3.0)
    for seed in range(12):
        rng = np.random.default_rng(seed)
        length = 400 if seed % 2 else 700
        sample = (
            make.repeat(rng, length) if kind == "repeat" else make.lookups(rng, length, kind, 5)
        )
        assert sample.tokens.shape == sample.weights.shape == (length,)
        assert sample.tokens[0] == BOS
        assert sample.lookups
        assert len({a.key for a in sample.lookups}) == len(sample.lookups)
        for answer in sample.lookups:
            tokens = sample.tokens[answer.start : answer.stop]
            assert tokenizer.decode(tokens.tolist()).strip() == answer.value.strip()
            if kind == "repeat":
                np.testing.assert_array_equal(
                    sample.tokens[answer.fact : answer.fact + len(tokens)], tokens
                )
                continue
            assert np.all(sample.weights[answer.start : answer.stop] == 3.0)
            assert sample.weights[answer.fact] == 0.0
            told = tokenizer.decode(sample.tokens[answer.fact :][:60].tolist())
            assert answer.key in told and answer.value in told
            asked = tokenizer.decode(sample.tokens[: answer.start].tolist())
            assert answer.key in asked[-120:]  # the question, right before the answer
            assert answer.fact < answer.start


def test_a_fact_lies_at_the_depth_asked_for(corpus: Corpus) -> None:
    make = Synthetic(corpus.tokenizer, lambda rng, n: passage(corpus.train, rng, n), 1.0)
    at = [
        make.lookups(np.random.default_rng(0), 400, "passkey", 1, depth).lookups[0].fact
        for depth in (0.0, 0.5, 1.0)
    ]
    assert at[0] == 1
    assert abs(at[1] - (at[0] + at[2]) / 2) <= 1


def test_the_shortest_sequences_hold_a_fact_or_none(corpus: Corpus) -> None:
    make = Synthetic(corpus.tokenizer, lambda rng, n: passage(corpus.train, rng, n), 1.0)
    for seed in range(2000):
        rng, kind = np.random.default_rng(seed), ("passkey", "pairs")[seed % 2]
        sample = make.lookups(rng, SHORTEST, kind, 1, depth=0.5)
        assert len(sample.tokens) == SHORTEST and len(sample.lookups) <= 1


def test_copies_repeat_what_counts(corpus: Corpus) -> None:
    make = Synthetic(corpus.tokenizer, lambda rng, n: passage(corpus.train, rng, n), 1.0)
    for seed in range(5):
        sample = make.copies(np.random.default_rng(seed), 120)
        ((lookup),) = sample.lookups
        period = lookup.start - 1
        assert sample.tokens[0] == BOS and len(sample.tokens) == 120
        np.testing.assert_array_equal(sample.tokens[1 + period :], sample.tokens[1:-period])
        np.testing.assert_array_equal(sample.weights > 0, np.arange(120) > period)


def test_lines_are_broken_between_words() -> None:
    text = "\n\n".join(" ".join(["word"] * n) for n in (40, 3, 25))
    broken = with_broken_lines(text, 62)
    assert max(map(len, broken.split("\n"))) <= 62
    assert broken.split() == text.split() and broken.count("\n\n") == 2


def test_schedule() -> None:
    peak, warmup = 2.0, 0.1
    whole = (Stage(until=1, context=64, batch=1),)
    size = dataclasses.replace(SMOKE, learning_rate=peak, warmup=warmup, stages=whole)
    rates = [learning_rate(p, size) for p in np.linspace(0, 1, 101)]
    assert rates[0] == 0 and rates[5] == pytest.approx(peak / 2)
    assert max(rates) == rates[10] == pytest.approx(peak)
    assert all(a > b for a, b in zip(rates[10:], rates[11:], strict=False))
    assert rates[-1] == pytest.approx(FLOOR * peak)
    assert rates[55] == pytest.approx(peak * (1 + FLOOR) / 2)
    own = Stage(until=0.5, context=64, batch=1, rate=0.5)
    size = dataclasses.replace(size, stages=(own, *whole))
    split = [learning_rate(p, size) for p in np.linspace(0, 1, 201)]
    assert split[0] == 0 and max(split[:100]) == split[99] == pytest.approx(0.5)
    np.testing.assert_allclose(split[100:], rates)


def test_progress_in_time_ends_on_time_and_goes_on_where_it_was() -> None:
    clock = Clock(tokens=1000)
    clock.seen, clock.seconds = 250, 40.0
    assert clock.progress == 0.25
    clock.end_in(60.0)
    assert clock.progress == 0.25
    clock.seconds += 30
    assert clock.progress == pytest.approx(0.625)
    again = Clock(**dataclasses.asdict(clock))
    again.end_in(10.0)
    assert again.progress == pytest.approx(0.625)
    again.seconds += 11
    assert again.progress == 1


def test_resuming_equals_an_uninterrupted_run(
    corpus: Corpus, trained: Path, tmp_path: Path
) -> None:
    job = _Job(settings(), corpus, tmp_path)
    assert not job.run(lambda: job.clock.step == 3)  # in the first of the two stages
    assert run_training(settings(), corpus, tmp_path, resume=True)
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == (
        trained / "model" / "model.safetensors"
    ).read_bytes()
    with pytest.raises(InputError, match="seed 0, not 1"):
        run_training(settings(seed=1), corpus, tmp_path, resume=True)
    with pytest.raises(InputError, match="holds a training"):
        run_training(settings(), corpus, tmp_path, resume=False)


def test_training_learns_and_writes_its_curve(trained: Path) -> None:
    result = json.loads((trained / "loss.json").read_text())
    curve = result["curve"]
    books = [point["books"] for point in curve if "books" in point]
    assert books[-1] < books[0] and "books" not in curve[0]  # it begins with copies alone
    assert curve[-1]["tokens"] == result["tokens"] >= SMOKE.tokens
    assert result["validation"]["context"] == SMOKE.context
    assert {p["tokens"] for p in result["validations"]} < {p["tokens"] for p in curve}


def test_an_export_has_transformers_logits(data: Path, tmp_path: Path) -> None:
    import torch
    import transformers

    tokenizer_json = (data / "tokenizer.json").read_text()
    hf = hf_config(SMOKE, 320)
    params = initial_params(config_from_hf(hf), seed=5)
    export(tmp_path / "m", hf, params, tokenizer_json)
    plan = blueprint(config_from_hf(hf), jnp.float32)
    tokens = np.random.default_rng(0).integers(0, 320, (2, 40)).astype(np.int32)
    ours = jax.jit(lambda p, t: forward(plan, p, t))(params, jnp.asarray(tokens))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(ours, expected, atol=2e-5)
    wrapped = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    assert wrapped("the old man").input_ids[0] == BOS
    assert (
        wrapped.decode(wrapped("the old man").input_ids, skip_special_tokens=True) == "the old man"
    )


def test_an_export_in_bfloat16_is_converted(data: Path, tmp_path: Path) -> None:
    from infinigen_jax.convert import convert

    hf = hf_config(SMOKE, 320) | {"dtype": "bfloat16"}
    params = initial_params(config_from_hf(hf), seed=5)
    export(tmp_path / "m", hf, params, (data / "tokenizer.json").read_text())
    convert(tmp_path / "m", tmp_path / "c", calibration=[3, 4, 5, 6, 7, 8] * 20)
    assert json.loads((tmp_path / "c" / "config.json").read_text())["dtype"] == "bfloat16"
    rounded = jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(jnp.float32), params)
    read = load(tmp_path / "c", "float32").params
    jax.tree.map(np.testing.assert_array_equal, read, rounded)


def test_the_larger_sizes_are_what_the_readme_says() -> None:
    def count(size: str) -> int:
        hf = hf_config(SIZES[size], SIZES[size].vocabulary)
        shapes = jax.eval_shape(lambda: initial_params(config_from_hf(hf), 0))
        return sum(leaf.size for leaf in jax.tree.leaves(shapes))

    assert round(count("gpu") / 1e6, 1) == 25.7 and round(count("cpu") / 1e6, 1) == 2.6
    assert SIZES["gpu"].context == 4096


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--books", "nowhere"], "holds no books_train"),
        ([], "--books is missing"),
        (["--minutes", "0"], "--minutes"),
        (["--tokens", "-1"], "--tokens"),
        (["--synthetic", "2"], "--synthetic"),
        (["--data", "nowhere"], "not a prepared corpus"),
    ],
)
def test_wrong_input_is_one_line(
    given: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = ["--size", "smoke", "--out", str(tmp_path / "out")]
    assert train.main([*needed, *given]) == 2
    error = capsys.readouterr().err
    assert named in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_training_in_bfloat16_has_float32_gradients(corpus: Corpus) -> None:
    """The GPU's dtype and recomputed layers give the same gradients up to rounding."""
    config = config_from_hf(hf_config(SMOKE, 320))
    params = initial_params(config, 0)
    tokens = jnp.asarray(windows(corpus.val, 65, 4))

    def gradient(dtype: Any, remat: bool) -> Any:
        training = Training(blueprint(config, dtype), attention(dtype), remat, dtype)
        loss = jax.jit(jax.grad(lambda p: jnp.mean(token_losses(training, p, tokens))))
        with jax.numpy_dtype_promotion("standard"):  # JAX's own attention promotes implicitly
            return jax.tree.leaves(loss(params))

    for exact, rounded in zip(
        gradient(jnp.float32, False), gradient(jnp.bfloat16, True), strict=True
    ):
        assert rounded.dtype == jnp.float32
        # bfloat16 has 8 bits; errors of two layers add up
        assert np.linalg.norm(exact - rounded) < 0.05 * np.linalg.norm(exact)
