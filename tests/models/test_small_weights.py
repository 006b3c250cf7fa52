"""Matrices in two bytes, one byte or half a byte per number."""

import dataclasses
import functools
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import quants
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime import SPARSE, engine, random_model, slow, tokens_of

from benchmarks.shapes import with_plain_matrices
from infinigen_jax import Engine, Model, embedded, generate, load, plan
from infinigen_jax.cli.options import load_engine
from infinigen_jax.decode.compiler_options import step_options
from infinigen_jax.engine.memory_plan import step_bytes
from infinigen_jax.engine.rounds import judge
from infinigen_jax.machine.memory_limits import tree_bytes
from infinigen_jax.messages import Messages
from infinigen_jax.models import Params, small_weights
from infinigen_jax.models.linear import project, split
from infinigen_jax.models.small_weights import FEW_ROWS, product, rows_of, shrink, shrink_part
from infinigen_jax.settings.engine import WEIGHT_DTYPES
from infinigen_jax.speculation.query import speculation_weights

SIZES = [24, 100, 1600]  # whole groups or not; a sum longer than is written out


def random_rows(outputs: int, inputs: int, seed: int = 0) -> np.ndarray:
    """Rows of different scales, some of them not centred."""
    rng = np.random.default_rng(seed)
    scale, mean = np.exp(rng.normal(size=(outputs, 1))), rng.normal(size=(outputs, 1))
    return (scale * (rng.normal(size=(outputs, inputs)) + mean)).astype(np.float32)


def small(rows: np.ndarray, dtype: str) -> Params:
    return shrink_part({"weight": jnp.asarray(rows)}, dtype)


def groups_of(rows: np.ndarray) -> np.ndarray:
    """Groups of 32 inputs, the last one padded with zeros."""
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 32)))
    return padded.reshape(len(rows), -1, 32)


@pytest.mark.parametrize(
    ("kind", "dtype"), [(Kind.Q8_0, "int8"), (Kind.Q4_0, "int4"), (Kind.Q4_1, "int4")]
)
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32 - 1))
def test_blocks_of_gguf_files_are_held_exactly(kind, dtype, seed):
    rows = random_rows(16, 96, seed)
    rows[3, 32:64] = 0
    rows[5, :32] = 0.75
    stored = quants.dequantize(quants.quantize(rows, kind), kind)
    held = np.asarray(rows_of(small(stored, dtype), 96))
    errors = np.abs(groups_of(held) - groups_of(stored)).max(axis=-1)
    assert (errors <= 1e-6 * np.abs(groups_of(stored)).max(axis=-1)).all()


@pytest.mark.parametrize("inputs", SIZES)
def test_numbers_are_rounded(inputs):
    rows = random_rows(7, inputs)
    rounded = np.asarray(jnp.asarray(rows).astype(jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_array_equal(rows_of(small(rows, "bfloat16"), inputs), rounded)
    for dtype in ("int8", "int4"):
        part = small(rows, dtype)
        held = np.asarray(rows_of(part, inputs))
        assert held.shape == rows.shape
        step = np.asarray(part["scale"])[:, : -(-inputs // 32)]
        errors = np.abs(groups_of(held) - groups_of(rows)).max(axis=-1)
        assert (errors <= 0.5001 * step).all()
        largest, smallest = groups_of(rows).max(axis=-1), groups_of(rows).min(axis=-1)
        if dtype == "int8":
            expected = np.maximum(largest, -smallest) / 127
            np.testing.assert_allclose(step, expected, rtol=1e-6)
        else:
            assert (step <= 1.0001 / 8 * (largest - smallest)).all()


@pytest.mark.parametrize("outputs", [27, 31], ids=["equal-pieces", "a-rest"])
def test_a_matrix_in_pieces_is_that_at_once(monkeypatch, outputs):
    part = {"weight": np.random.default_rng(4).standard_normal((outputs, 70)).astype(np.float32)}
    whole = shrink_part(part, "int4")
    monkeypatch.setattr(small_weights, "AT_ONCE", 9 * 70)
    pieces = shrink_part(part | {"bias": np.zeros(outputs)}, "int4")  # another program
    assert whole.keys() == pieces.keys() - {"bias"}
    for name, x in whole.items():
        np.testing.assert_array_equal(pieces[name], x)


def test_bytes_per_number():
    rows = random_rows(8, 256)
    sizes = {dtype: tree_bytes(small(rows, dtype)) / rows.size for dtype in WEIGHT_DTYPES}
    assert sizes == {"bfloat16": 2, "int8": 1.125, "int4": 0.75}


def test_embeddings_and_logits_are_not_in_four_bits():
    params = shrink(random_model("gqa").params["embedding"], "int4")
    assert params["tokens"]["codes"].dtype == params["head"]["codes"].dtype == jnp.int8
    assert "codes" not in params["norm"]


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
@pytest.mark.parametrize(
    ("activations", "rounding", "sizes"),
    [("float32", 2e-6, SIZES), ("bfloat16", 2**-7, SIZES[1:2])],
)
def test_the_product_is_that_with_the_rounded_matrix(dtype, activations, rounding, sizes):
    rng = np.random.default_rng(1)
    for inputs in sizes:
        weights = random_rows(7, inputs)
        weights[3] = 0
        part = small(weights, dtype)
        matrix = np.asarray(rows_of(part, inputs), np.float64).T
        others = [(), (2, 3)] if inputs == SIZES[1] else []
        for rows in ((1,), (FEW_ROWS,), (40,), *others):
            a = jnp.asarray(rng.normal(size=(*rows, inputs)), activations)
            found = jax.jit(product)(a, part)
            assert found.dtype == a.dtype and found.shape == (*rows, 7)
            exact = np.asarray(a, np.float64)
            bound = rounding * (np.abs(exact) @ np.abs(matrix))
            assert (np.abs(np.asarray(found, np.float64) - exact @ matrix) <= bound).all()


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
def test_one_row_in_a_step_makes_no_full_matrix(dtype):
    part, row = small(random_rows(640, 512), dtype), jnp.ones((1, 512))
    program = jax.jit(project, compiler_options=step_options(engine("one").decoder))
    memory = program.lower(row, part).compile().memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 10 * 640


def shrink_model(params: Params, dtype: str) -> Params:
    layers = [shrink(layer, dtype) for layer in params["layers"]]
    return {"embedding": shrink(params["embedding"], dtype), "layers": layers}


@functools.cache
def small_model(name: str, dtype: str) -> Model:
    model = random_model(name.removesuffix("-tied"))
    config, params = model.config, model.params
    if name.endswith("-tied"):
        config = dataclasses.replace(config, tie_embeddings=True)
        rest = {name: x for name, x in params["embedding"].items() if name != "head"}
        params = params | {"embedding": rest}
    return dataclasses.replace(model, config=config, params=shrink_model(params, dtype))


OWN = dataclasses.replace(SPARSE, query="own")


@pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [
        ("one-tied", "int4", {"policy": OWN, "dense_layers": 0}),
        slow("opt", "int4", {}),
        slow("qwen2", "bfloat16", {"policy": OWN}),
        slow("qwen2-one", "int8", {"policy": OWN, "dense_layers": 0, "weights": "host"}),
    ],
)
def test_tokens_are_those_of_the_rounded_model(name, dtype, options):
    chosen = {"policy": SPARSE, "dense_layers": 1} | options
    model = small_model(name, dtype)
    made = Engine(model, **chosen)
    joined = "qkv" in made.runtime.weights.params["layers"][-1]
    assert joined == ("weights" not in options)
    full = Engine(with_plain_matrices(model), **(chosen | {"weights": "device"}))
    assert tokens_of(made) == tokens_of(full)


@pytest.mark.usefixtures("shallow")
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
@pytest.mark.parametrize("weights", ["device", "host"])
def test_loading(dtype, weights):
    model = load(embedded(), "float32", weight_dtype=dtype, weights=weights)
    expected = shrink_model(load(embedded(), "float32").params, dtype)
    if weights == "host":  # these are not joined
        width = model.config.query_width
        expected["layers"] = [split(layer, width) for layer in expected["layers"]]
    jax.tree.map(np.testing.assert_array_equal, model.params, expected)


@pytest.mark.usefixtures("shallow")
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a CPU's forms")
def test_on_a_cpu_matrices_in_bfloat16_have_this_form_and_drafts_a_smaller_one():
    model = load(embedded(), "bfloat16")
    plain = jax.tree.map(lambda x: x.astype(jnp.bfloat16), load(embedded(), "float32").params)
    expected = {form: shrink_model(plain, form) for form in ("bfloat16", "int8")}
    jax.tree.map(np.testing.assert_array_equal, model.params, expected["bfloat16"])
    drafter = Engine(model, lossless=True).runtime.drafter[1].params
    jax.tree.map(np.testing.assert_array_equal, drafter["layers"], expected["int8"]["layers"])


@pytest.mark.usefixtures("shallow")
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
def test_a_projection_of_speculation_has_the_form_of_the_layers_own(dtype):
    model = load(embedded(), "float32", weight_dtype=dtype)
    made = speculation_weights(model, 1, 8, query="corrected")["ahead"]
    expected = shrink_part(jax.tree.map(np.array, model.ahead[1].projection), dtype)
    jax.tree.map(np.testing.assert_array_equal, made, expected)


def test_a_projection_is_wide_where_the_layers_own_is():
    model = random_model("opt")
    layers = [shrink(x, "int4", frozenset({"q", "kv"})) for x in model.params["layers"]]
    model = dataclasses.replace(model, params=model.params | {"layers": layers})
    assert speculation_weights(model, 1, 4)["partial"]["codes"].dtype == jnp.int8


@pytest.mark.usefixtures("shallow")
def test_logits_of_a_verification_make_no_full_matrix():
    model = load(embedded(), "float32", weight_dtype="int8")
    engine, tokens = Engine(model, lossless=True), jnp.ones((1, 6), jnp.int32)
    one, x = jnp.ones((1,), jnp.int32), jnp.ones((*tokens.shape, model.config.hidden_size))
    embedding = engine.runtime.weights.params["embedding"]
    lowered = judge.of(engine.decoder).lower(embedding, x, tokens, one, one, None)
    memory: Any = lowered.compile().memory_analysis()
    assert memory.temp_size_in_bytes < model.config.vocab_size * model.config.hidden_size


@pytest.mark.usefixtures("shallow")
def test_the_generate_command_loads_them():
    options = ("--model", "tiny-llama", "--weight-dtype", "int8")
    made = load_engine(generate.build_parser().parse_args(options), Messages(True))
    assert made.model.params["layers"][0]["down"]["codes"].dtype == jnp.int8


@pytest.mark.usefixtures("shallow")
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
def test_a_plan_has_the_bytes_of_the_loaded_model(dtype, command, tmp_path):
    out = tmp_path / "plan.json"
    rates = ("--device-bandwidth", "20", "--copy-bandwidth", "10")
    options = ("--context", "256", *rates, "--json", out)
    forms = {"--weight-dtype": load(embedded(), "float32", weight_dtype=dtype)}
    if dtype == "bfloat16":
        forms["--dtype"] = load(embedded(), dtype)
    for option, model in forms.items():
        status, text, _ = command(plan.main, *options, option, dtype)
        assert status == 0 and re.search(rf"{dtype}( weights|:)", text)
        planned = json.loads(out.read_text())["asked"]["weights"]
        assert planned == tree_bytes(model.params) < 0.51 * tree_bytes(load(embedded()).params)


def test_products_with_few_rows_are_planned_without_decoded_matrices():
    made = engine("gqa", SPARSE)
    decoder, whole = made.decoder, made.runtime.weights.params
    small = shrink_model(whole, "int8")
    for drafted in (0, FEW_ROWS):
        step = step_bytes(decoder, small, 1, 128, drafted)
        assert step == step_bytes(decoder, whole, 1, 128, drafted)
    matrices = [x["weight"].size for x in whole["layers"][0].values() if "weight" in x]
    sizes = 1, 128, FEW_ROWS + 1
    decoded = step_bytes(decoder, small, *sizes) - step_bytes(decoder, whole, *sizes)
    assert decoded >= 4 * sum(matrices)
    # A verification of 16 tokens decodes nothing for one sequence.
    assert step_bytes(decoder, small, 1, 128, 16) == step_bytes(decoder, whole, 1, 128, 16)
    assert step_bytes(decoder, small, 2, 128, 16) > step_bytes(decoder, whole, 2, 128, 16)
