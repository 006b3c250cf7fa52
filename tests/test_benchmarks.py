"""The benchmark of decoding, run at a toy size: what it writes, and that its parts are right."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import decode, machine, shapes
from benchmarks.physics import resident_traffic
from benchmarks.systems import MARGIN, WARMUP_ROUNDS
from infinigen_jax.models import blueprint

CONTEXTS = [96]


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "toy.json"
    arguments = "--shape toy --contexts 96 --tokens 3 --rounds 2 --budget 0.1".split()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "memory_read_bandwidth", lambda: 1e10)
        assert decode.main([*arguments, "--json", str(path)]) == 0
    return json.loads(path.read_text())


def entries(result, name):
    return [context["systems"][name] for context in result["contexts"]]


def test_result_tells_machine_and_settings(result):
    described = result["machine"]
    assert described["cores"] > 0 and described["memory_bytes"] > 0 and described["cpu"]
    assert described["versions"]["jax"] == jax.__version__
    assert {"torch", "transformers"} <= described["versions"].keys()
    assert {"date", "commit"} <= described.keys()
    assert result["settings"]["budget"] == 0.1 and result["settings"]["rounds"] == 2
    assert [context["context"] for context in result["contexts"]] == CONTEXTS
    assert result["contexts"][0]["compilations_after_warmup"] == 0
    assert result["logits_relative_difference"] < 1e-3
    assert result["memory_read_bytes_per_second"] == 1e10


@pytest.mark.parametrize("name", decode.OURS + decode.THEIRS)
def test_every_system_is_timed_in_every_round(result, name):
    for entry in entries(result, name):
        assert len(entry["round_seconds"]) == 2 and min(entry["round_seconds"]) > 0
        median = np.median(entry["round_seconds"])
        np.testing.assert_allclose(entry["tokens_per_second"], 3 / median)
        np.testing.assert_allclose(entry["milliseconds_per_step"], 1e3 * median / 3)
        assert entry["floor_milliseconds"] > 0
        assert entry["bytes_per_step"].keys() == {
            "weights",
            "device_cache",
            "index",
            "host_rows",
        }


@pytest.mark.parametrize("schedule", ["fused", "layerwise"])
def test_infinigen_fetches_a_part_and_full_everything(result, schedule):
    for entry in entries(result, f"infinigen-{schedule}"):
        assert 0 < entry["fetched_fraction"] <= 0.1
        assert entry["host_to_device_bytes_per_token"] > 0
    for entry in entries(result, f"full-{schedule}"):
        assert entry["fetched_fraction"] == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("name", ["full-fused", "full-layerwise", "transformers-static"])
def test_systems_that_attend_to_everything_write_the_same(result, name):
    drawn = (2 + WARMUP_ROUNDS) * (3 + MARGIN)
    assert {entry["first_tokens_equal_to_reference"] for entry in entries(result, name)} == {drawn}


def test_table_has_a_line_for_each_context_and_system(result):
    lines = decode.table(result).splitlines()
    assert len(lines) == 2 + len(CONTEXTS) * len(decode.OURS + decode.THEIRS)
    assert any("infinigen-fused" in line and line.endswith("x") for line in lines)


@functools.cache
def model_of(name):
    return shapes.peaked_model(shapes.SHAPES[name], 256, "float32")


@pytest.mark.parametrize("name", ["toy", "opt"])
def test_traffic_counts_weights_and_cache(name):
    model = model_of(name)
    config = model.config
    traffic = resident_traffic(model, batch=2, context=100)
    assert traffic.device_cache == (
        2 * 100 * config.num_layers * config.num_kv_heads * config.head_dim * 2 * 4
    )
    assert 0 < traffic.weights < 4 * sum(x.size for x in jax.tree.leaves(model.params))
    total = traffic.weights + traffic.device_cache
    assert traffic.floor_ms(1e9, None) == pytest.approx(total / 1e6)


@pytest.mark.parametrize("name", ["toy", "opt"])
def test_attention_is_peaked(name):
    """Logits of the first layer spread as asked for, and few columns of the basis hold them."""
    model = model_of(name)
    plan = blueprint(model.config, jnp.float32)
    tokens = jnp.asarray(shapes.prompt(model.config, 256))
    positions = jnp.arange(256, dtype=jnp.int32)
    x = plan.embedding(model.params["embedding"]).embed(tokens, positions)
    layer = plan.layer(model.params["layers"][0])
    a = layer.attention_input(x)
    q, (k, _) = layer.query(a, positions), layer.key_value(a, positions)
    k = jnp.repeat(k, model.config.group_size, axis=1)
    scores = jnp.einsum("shd,thd->hst", q, k)
    assert 0.5 < float(scores.std()) / shapes.SCORE_DEVIATION < 1.5
    basis = model.bases[0]
    assert basis is not None
    quarter = model.config.head_dim // 4
    partial = jnp.einsum("shd,hdr->shr", q, jnp.repeat(basis.query, model.config.group_size, 0))
    energy = jnp.sum(partial**2, axis=(0, 1))
    assert float(energy[:quarter].sum() / energy.sum()) > 0.5


def test_machine_measures_memory():
    assert 1e8 < machine.memory_read_bandwidth(1 << 24) < 1e13
    assert machine.host_to_device_bandwidth(1 << 20) is None or jax.default_backend() != "cpu"


def test_plot(result, tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.plot import draw

    draw([result], tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").stat().st_size > 1000
