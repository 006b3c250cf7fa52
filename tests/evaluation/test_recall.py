"""Recall: observations of the engine's steps, against NumPy over the plain forward pass."""

import dataclasses
import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from runtime import SPARSE, engine, plain_pass, random_model, slow
from tiny import LAYERS, only

from infinigen_jax import embedded, evaluate
from infinigen_jax.evaluation import recall
from infinigen_jax.evaluation.recall import lost_most, study_windows, summary
from infinigen_jax.evaluation.study import watch
from infinigen_jax.policies import Full, Oracle, Window

pytestmark = pytest.mark.usefixtures("shallow")

CONTEXT, SIZE = 24, 40
WINDOWS = np.random.default_rng(3).integers(3, 96, (3, SIZE)).astype(np.int32)
SETTINGS: dict[str, Any] = {"window": SIZE, "context": CONTEXT, "chunk": 6, "batch": 2}
NARROW = {"budget": 0.2, "sinks": 2, "window": 4}


def attended_by_window(position: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return positions that `window` attends to, those only on the host, and the budget's rows."""
    t = np.arange(SIZE)
    resident = (t <= position) & ((t < 2) | (t > position - 4))
    eligible = (t <= position) & ~resident
    rows = min(position // 5, eligible.sum())
    fetched = eligible & (t > position - 4 - rows)
    return resident | fetched, eligible, rows


@pytest.mark.parametrize("name", ["gqa", slow("opt")])
def test_window_against_numpy(name):
    """The rows of `window` are known; the first layer that selects has the exact input."""
    arrays, _ = study_windows(engine(name, Window(**NARROW)), WINDOWS, SETTINGS)
    config = random_model(name).config
    steps = range(CONTEXT - 1, SIZE - 1)
    assert arrays["layers"].tolist() == [1]
    a, weights, values, layer, output = plain_pass(random_model(name), WINDOWS)[0][1]
    expected: dict[str, list] = {"mass": [], "oracle_mass": [], "error": [], "hits": []}
    for p in steps:
        attended, eligible, rows = attended_by_window(p)
        row = weights[:, :, p]
        past = row.copy()
        past[..., p] = 0
        # The oracle: by the group's softmax over the rows that can be fetched.
        among = np.where(eligible, row, 0)
        among = among / among.sum(axis=-1, keepdims=True)
        among = among.reshape(3, config.num_kv_heads, config.group_size, SIZE).sum(axis=2)
        best = np.zeros(among.shape, bool)
        np.put_along_axis(best, np.argsort(-among, axis=-1)[..., :rows], True, axis=-1)
        wide = np.repeat(best, config.group_size, axis=1)
        resident = attended & ~eligible
        total = past.sum(axis=-1)
        expected["mass"].append((past * attended).sum(axis=-1) / total)
        expected["oracle_mass"].append((past * (wide | resident)).sum(axis=-1) / total)
        expected["hits"].append((best & attended).sum(axis=-1))
        kept = row * attended
        kept = kept / kept.sum(axis=-1, keepdims=True)
        o = jnp.asarray(np.einsum("bhk,bkhd->bhd", kept, values), jnp.float32)
        made, true = np.asarray(layer.attention_output(o, a[:, p])), output[:, p]
        distance = np.linalg.norm(made - true, axis=-1) / np.linalg.norm(true, axis=-1)
        expected["error"].append(distance[:, None])
    for key, numbers in expected.items():
        combined = np.sum if key == "hits" else np.mean
        chunks = [combined(part, axis=0) for part in np.split(np.stack(numbers), [6, 12])]
        measured = arrays[key][:, 0]
        np.testing.assert_allclose(measured, np.stack(chunks, axis=-1), rtol=2e-3, atol=1e-4)


def test_the_oracle_finds_everything():
    line = summary(study_windows(engine("one", Oracle(**NARROW)), WINDOWS, SETTINGS)[0], SETTINGS)
    assert line["top_k_recall"] == pytest.approx(1) and line["of_oracle"] == pytest.approx(1)
    assert line["mass"] < 1 and line["error"] == pytest.approx(line["oracle_error"])
    assert line["error"] > 1e-3


@pytest.mark.slow
def test_a_tail_term_changes_the_error_and_nothing_else():
    found = []
    for tail in (False, True):
        policy = dataclasses.replace(SPARSE, tail=tail)
        found.append(summary(study_windows(engine("one", policy), WINDOWS, SETTINGS)[0], SETTINGS))
    for name in ("top_k_recall", "mass", "oracle_mass", "oracle_error"):
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-4)
    assert abs(found[1]["error"] - found[0]["error"]) > 1e-4


def test_nothing_selected_is_everything_attended():
    arrays, traffic = study_windows(engine("one", Full()), WINDOWS, SETTINGS)
    line = summary(arrays, SETTINGS)
    assert line["layers"] == [] and line["mass"] == line["of_oracle"] == 1 and line["error"] == 0
    assert traffic.tokens == 3 * 16 and lost_most(line) == ""


def test_parts_combine_to_the_whole():
    rng, tokens = np.random.default_rng(0), np.array([6, 6, 4])
    arrays = {name: rng.random((3, 2, 4, 3)) for name in (*recall.MEANS, *recall.COUNTS)}
    line = summary(arrays | {"layers": np.array([1, 2])}, SETTINGS)
    assert [(c["from"], c["to"]) for c in line["chunks"]] == [(24, 30), (30, 36), (36, 40)]
    for name in ("mass", "oracle_mass", "error"):
        chunks = np.array([chunk[name] for chunk in line["chunks"]])
        assert chunks @ tokens / 16 == pytest.approx(line[name])
        assert np.mean([layer[name] for layer in line["layers"]]) == pytest.approx(line[name])
    worst = min(line["layers"], key=lambda layer: layer["of_oracle"])
    assert lost_most(line).startswith(f"layer {worst['layer']}: ")


def test_watching_changes_nothing():
    chosen = engine("one", SPARSE)
    scores = []
    for watched in (False, True):
        run, steps = chosen.start(WINDOWS[:2, :23].tolist(), max_new_tokens=8), []
        for i in range(23, 29):
            tokens, targets = WINDOWS[:2, i], WINDOWS[:2, i + 1]
            log_probs = run.watch(watch, tokens)[0] if watched else run.predict(tokens)
            steps.append(np.asarray(log_probs)[np.arange(2), targets])
        scores.append(np.stack(steps))
    np.testing.assert_allclose(scores[1], scores[0], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_command(tmp_path, capsys):
    text, result = tmp_path / "t.txt", tmp_path / "r.json"
    text.write_text("The old man went down to the sea, and nobody asked him why. " * 30)
    arguments = ["recall", "--model", str(embedded()), "--text", str(text), "--json", str(result)]
    arguments += "--window 64 --context 56 --windows 2 --budget 0.1 --policy".split()
    arguments += ["window:window=16", "oracle:window=16"]
    arguments += ["--dense-layers", str(LAYERS - 1)]
    assert evaluate.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [[c.strip() for c in row.split("|")][1:-1] for row in lines]
    assert [row[0] for row in rows[2:]] == ["full", "window", "oracle"] and len(rows) == 5
    assert rows[4][4] == "100.0 %" and rows[4][7] == "100.0 %"
    assert only(tmp_path) == ["r.json", "t.txt"]
    record = json.loads(result.read_text())
    assert record["command"] == "recall"
    window = record["configurations"][1]
    assert [layer["layer"] for layer in window["layers"]] == [LAYERS - 1]
    assert 0 < window["mass"] <= window["oracle_mass"] < 1
