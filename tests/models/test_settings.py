"""Settings of `config.json`: defaults, older spellings, rotary embeddings, windows, refusals."""

import dataclasses
import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from runtime import SPARSE, long_rope, random_model
from test_families import YARN
from tiny import LLAMA, refuses

from infinigen_jax import Engine, InputError, UnsupportedModelError
from infinigen_jax.checkpoint.hf_folder import read_config
from infinigen_jax.convert.pipeline import convert
from infinigen_jax.loading import load as checkpoint
from infinigen_jax.models import ModelConfig, blueprint, config_from_hf, random_params


@pytest.mark.parametrize(
    "short, lengths, most",
    [
        (None, [10, 60], 40),
        (None, [10, 20], 64),
        (None, [100], 1),
        (80, [10, 70], 11),
        (80, [80], 1),
        (80, [81], 19),
        (100, [70], 30),
    ],
)
def test_new_tokens_that_a_model_takes(short, lengths, most):
    """100 positions; texts of up to `short` tokens may not grow beyond."""
    config = (long_rope("one", short) if short else random_model("one")).config
    config = dataclasses.replace(config, max_positions=100)
    assert config.fitting(64, [[7] * length for length in lengths]) == most


def test_a_sequence_does_not_grow_out_of_its_frequencies():
    made = Engine(long_rope("one", 32), policy=SPARSE, dense_layers=0)
    prompts, said = [[3] * 27, [3] * 40], "a prompt of 27 would grow beyond; give at most 6 new"
    refuses(said, made.generate, prompts, max_new_tokens=7)
    refuses("context 40: give 2 to 32", made.conversation, context=40)


HF = LLAMA | {"rope_theta": 1e6, "max_position_embeddings": 32}
ORIGINAL = "original_max_position_embeddings"


@pytest.mark.parametrize(
    ("scaling", "others", "new", "positions"),
    [
        (None, {}, {"rope_type": "default"}, 32),
        ({"type": "linear", "factor": 2}, {}, {"factor": 2.0}, 64),
        ({"type": "dynamic", "factor": 2.0}, {}, {"factor": 2.0}, 64),
        ({"type": "yarn", "factor": 4.0}, {}, {"factor": 4.0, ORIGINAL: 32}, 128),
        ({"type": "yarn", "factor": None}, {ORIGINAL: 8}, {"factor": 4.0, ORIGINAL: 8}, 32),
    ],
)
def test_configurations_of_before_transformers_5(scaling, others, new, positions):
    kind = (scaling or {}).get("type", "default")
    before = config_from_hf(HF | {"rope_scaling": scaling} | others)
    settled = {"rope_theta": 1e6, "rope_type": kind} | new
    after = {name: value for name, value in HF.items() if name != "rope_theta"}
    assert before == config_from_hf(after | {"rope_parameters": settled})
    assert before.max_positions == positions and before.rope is not None
    assert before.rope.theta == 1e6 and before.rope.kind == kind


def test_older_settings_of_the_rotation():
    """OLMo 3 has them by kind of layer, and Ministral 3 has defaults."""
    yarn = YARN | {"rope_theta": 1e5}
    olmo = HF | {"model_type": "olmo3", "num_hidden_layers": 4}
    kinds = {"full_attention": yarn, "sliding_attention": {"rope_theta": 1e5}}
    flat, nested = (config_from_hf(olmo | {"rope_parameters": x}) for x in (yarn, kinds))
    assert flat == nested and flat.layer_ropes[0] != flat.layer_ropes[3]
    ministral = LLAMA | {"model_type": "ministral3", "head_dim": 8, "num_key_value_heads": 2}
    before = {"rope_theta": 1e5, "rope_scaling": YARN | {"llama_4_scaling_beta": 0.3}}
    after = {"rope_parameters": yarn | {"llama_4_scaling_beta": 0.3}}
    assert config_from_hf(ministral | before) == config_from_hf(ministral | after)
    assert config_from_hf(ministral).query_growth == 0.1


def test_settings_that_files_leave_out():
    """Defaults of transformers; Cohere's real context; the approximate GELU of Gemma."""

    def read(family: str, **changes) -> ModelConfig:
        sizes = {"max_position_embeddings": 32, "num_key_value_heads": 2}
        return config_from_hf(LLAMA | {"model_type": family} | sizes | changes)

    assert read("cohere", model_max_length=48).max_positions == 48
    assert read("cohere2", sliding_window=7, model_max_length=None).max_positions == 32
    thetas = {"apertus": 1.2e7, "cohere": 5e5, "cwm": 1e6, "helium": 1e5}
    for family, theta in thetas.items():
        for left_out in ({}, {"rope_theta": None}):
            rope = read(family, **left_out).rope
            assert rope is not None and rope.theta == theta
            assert rope.factor == {"apertus": 8, "cwm": 16}.get(family, 1)
    chunked = {"original_max_position_embeddings": 16}  # supported up to the original context
    for family in ("qwen2", "qwen3"):
        assert read(family, dual_chunk_attention_config=chunked).max_positions == 16
    assert read("cwm").eos_ids == () and len(read("cwm", vocab_size=128256).eos_ids) == 3
    assert read("gemma", hidden_act="gelu").activation == "gelu_pytorch_tanh"
    assert read("gemma", hidden_act="silu").activation == "silu"


PLAIN = [None, 0, -1, 1, 4.0, 32, 1e300, float("nan"), "4", "many", [], {}, True]
VALUES = st.sampled_from([*PLAIN, [1.0, 2.0]])
SETTINGS = (
    "factor original_max_position_embeddings low_freq_factor high_freq_factor beta_fast beta_slow "
    "attention_factor mscale mscale_all_dim truncate rope_theta partial_rotary_factor "
    "short_factor long_factor"
).split()


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]),
    st.dictionaries(st.sampled_from(SETTINGS), VALUES),
)
@example("yarn", {"factor": 4.0, "mscale": -4.0, "mscale_all_dim": 1})
def test_any_rope_settings_are_read_or_refused_in_one_line(tmp_path, kind, rope_settings):
    parameters = {"rope_type": kind} | rope_settings
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"rope_parameters": parameters}))
    try:
        _, config = read_config(tmp_path)
    except InputError as error:
        assert "config.json" in str(error) and "\n" not in str(error)
        return
    assert config.rope is not None and np.isfinite(config.rope.frequencies(8)).all()
    assert np.isfinite(config.rope.attention_factor)


def test_windows_of_configurations():
    def found(**changes) -> tuple[int | None, tuple[int, ...]]:
        sizes = {"num_hidden_layers": 3, "num_key_value_heads": 2}
        config = config_from_hf(LLAMA | sizes | changes)
        return config.sliding_window, config.sliding_layers

    assert found(model_type="mistral", sliding_window=7) == (7, (0, 1, 2))
    assert found(model_type="mistral", sliding_window=None) == (None, ())
    # A window of all positions, like the default here, is none.
    assert found(model_type="mistral") == found(model_type="mistral", sliding_window=64)
    assert found(model_type="mistral", sliding_window=64) == (None, ())
    qwen = {"model_type": "qwen2", "sliding_window": 7, "max_window_layers": 2}
    assert found(**qwen) == found(**qwen | {"max_window_layers": None}) == (None, ())
    assert found(**qwen, use_sliding_window=True) == (7, (2,))
    types = ["sliding_attention", "full_attention", "full_attention"]
    assert found(**qwen, use_sliding_window=True, layer_types=types) == (7, (0,))


def test_heads_of_gemma_4():
    """The hub's files name them; transformers 5 writes those of each layer."""
    sizes = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    base: Any = LLAMA | sizes | {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0}
    types = [f"{kind}_attention" for kind in ("full", "sliding", "sliding")]  # the last is full
    base |= {"num_key_value_heads": 2, "head_dim": 8, "layer_types": types, "sliding_window": 7}
    listed = {"per_layer_config": {i: {"head_dim": 16, "num_key_value_heads": 1} for i in "02"}}
    named = {"global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    config = config_from_hf(base | named)
    assert config == config_from_hf(base | listed | {"attention_k_eq_v": True})
    assert [config.of(i).head_dim for i in range(3)] == [16, 8, 16]
    assert [config.of(i).num_kv_heads for i in range(3)] == [1, 2, 1]
    assert config.full_attention_layers == [0, 2] and config.values_from_keys
    assert config_from_hf(base | named | {"rope_parameters": None}) == config
    alike = config_from_hf(base | {"global_head_dim": 8})
    assert alike.window_shape is None and alike.of(1) is alike


BASE = LLAMA | {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def of(family: str, **changes) -> dict[str, Any]:
    return BASE | {"model_type": family} | changes


GEMMA4 = of("gemma4_text", num_key_value_heads=2, sliding_window=7) | {
    "hidden_size_per_layer_input": 0
}
GEMMA, OPT = of("gemma3_text", head_dim=12), of("opt", ffn_dim=56)
LINEAR, DYNAMIC = ({"type": kind, "factor": 2.0} for kind in ("linear", "dynamic"))
SCALED = {"type": "yarn", "factor": 4.0}
EIGHTFOLD = {"rope_type": "linear", "factor": 8.0}
FACTORS = {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}
ALPHA = {"type": "dynamic", "factor": 1.0, "alpha": 50.0}
EXAONE = of("exaone4", num_key_value_heads=2)
TWICE = "rope_scaling that contradicts rope_parameters"
AWQ = {"quant_method": "awq"}
MARLIN = {"quant_method": "GPTQ", "format": "marlin"}
GPTQ_V2 = {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}
FP8: dict[str, Any] = {"quant_method": "fp8"}
GROUPS = {"format": "int-quantized", "config_groups": {"a": {"weights": {"group_size": 48}}}}
GRANITE4 = {"layer_types": ["attention"] * 2, "position_embedding_type": "x"}
GROWTH = "llama_4_scaling_beta"

REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("do_layer_norm_before", OPT | {"do_layer_norm_before": False}),
    ("word_embed_proj_dim", OPT | {"word_embed_proj_dim": 32}),
    ("_remove_final_layer_norm", OPT | {"_remove_final_layer_norm": True}),
    ("'longrope'", of("llama", rope_scaling={"rope_type": "longrope"})),
    ("partial_rotary_factor 0.5", of("llama", partial_rotary_factor=0.5)),
    ("full_attention", of("llama", rope_parameters={"full_attention": {}})),
    ("'dynamic' in smollm3 models", of("smollm3", rope_scaling=DYNAMIC)),
    ("factor below 1", of("llama", rope_scaling=LINEAR | {"factor": 0.5})),
    (TWICE, of("llama", rope_parameters={"rope_type": "default"}, rope_scaling={"type": "yarn"})),
    (TWICE, of("llama", rope_parameters=EIGHTFOLD, rope_scaling=LINEAR)),
    (f"{ORIGINAL} is 1000000000000", of("llama", rope_scaling=SCALED | {ORIGINAL: 10**12})),
    ("a context of", of("llama", rope_scaling=SCALED | {"factor": 1e300})),
    ("text_config is missing", {"model_type": "mistral3"}),
    ("layer_rope_theta 500.0 next to 10000", of("muse_glimmer_text", layer_rope_theta=[0, 500.0])),
    ("post_norm_eps 0", of("muse_glimmer_text", post_norm_eps=0)),
    ("output_vocab_size is 97", of("apertus", output_vocab_size=97)),
    ("with tied embeddings", of("apertus", output_vocab_size=9, tie_word_embeddings=True)),
    (f"{GROWTH} with rope type 'linear'", of("ministral3", rope_scaling=LINEAR | {GROWTH: 0.1})),
    ("num_attention_heads", of("hunyuan_v1_dense", rope_scaling=ALPHA, num_attention_heads=None)),
    ("rope alpha 1e-300", of("hunyuan_v1_dense", rope_scaling=ALPHA | {"alpha": 1e-300})),
    ("without a sliding_window", EXAONE | {"sliding_window": 0}),
    ("sliding_window_pattern", EXAONE | {"sliding_window_pattern": "LGLG"}),
    ("factor", of("llama", rope_scaling={"type": "linear"})),
    ("hidden_size_per_layer_input=256", of("gemma4_text")),
    ("num_kv_shared_layers=2", GEMMA4 | {"num_kv_shared_layers": 2}),
    ("mixture of experts (enable_moe_block)", GEMMA4 | {"enable_moe_block": True}),
    ("per_layer_config", GEMMA4 | {"per_layer_config": {"0": {"head_dim": 512}}}),
    ("per_layer_config", GEMMA4 | {"per_layer_config": {"1": {"intermediate_size": 9}}}),
    ("one head_dim", GEMMA4 | {"global_head_dim": 256, "attention_k_eq_v": True}),
    ("a sliding_window of all positions", GEMMA4 | {"sliding_window": 64}),
    ("an odd head size (7)", GEMMA4 | {"head_dim": 7}),
    ("one rope for all layers", GEMMA4 | {"rope_parameters": {"rope_theta": 1e6}}),
    ("use_bidirectional_attention=all", GEMMA4 | {"use_bidirectional_attention": "all"}),
    ("num_local_experts=8", of("granitemoehybrid", layer_types=["attention"] * 2)),
    ("layer type 'mamba'", of("granitemoehybrid", layer_types=["attention", "mamba"])),
    ("position_embedding_type 'x'", of("granitemoehybrid", **GRANITE4)),
    ("num_local_experts", of("llama", num_local_experts=8)),
    ("format 'awq (gemv)'", of("llama", quantization_config=AWQ | {"version": "GEMV"})),
    ("format 'gptq (gptq_v2)'", of("llama", quantization_config=GPTQ_V2)),
    ("format 'awq (gemv)'", of("llama", quantization_config=AWQ | {"format": "gemv"})),
    ("format 'gptq (marlin)'", of("llama", quantization_config=MARLIN)),
    ("format 'mixed-precision'", of("llama", quantization_config={"format": "mixed-precision"})),
    ("blocks of 96", of("llama", quantization_config=FP8 | {"weight_block_size": [96, 96]})),
    ("blocks of 48", of("llama", quantization_config=GROUPS)),
    ("weights in the format 'unknown'", of("llama", quantization_config=["fp8"])),
    ("sliding_window", of("llama", sliding_window=4096)),
    ("sliding_window", of("olmo2", sliding_window=4096)),
    ("'chunked_attention'", of("qwen2", layer_types=["chunked_attention"] * 2)),
    ("1 layer_types", of("qwen2", layer_types=["full_attention"])),
    ("without a sliding", of("qwen2", layer_types=["sliding_attention"] * 2)),
    ("model_type ministral", of("mistral", layer_types=["full_attention"] * 2)),
    ("'longrope' for heads of its size", of("phi3", rope_scaling=FACTORS)),
    ("'yarn' in a phi3", of("phi3", rope_scaling=SCALED)),
    ("epsilon nan", of("llama", rms_norm_eps=float("nan"))),
    ("'gpt_oss' is not supported: a mixture", of("gpt_oss")),
    ("'gemma3n' is not supported: of Gemma, the text", of("gemma3n")),
    ("clip_qkv=5.0", of("iquestcoder", clip_qkv=5.0)),
    ("max_position_embeddings", of("cohere", max_position_embeddings=None)),
    ("use_bidirectional_attention", GEMMA | {"use_bidirectional_attention": True}),
    ("attn_logit_softcapping=50.0", GEMMA | {"attn_logit_softcapping": 50.0}),
    ("final_logit_softcapping 0", GEMMA | {"final_logit_softcapping": 0}),
    ("one rope for all layers of a gemma3", GEMMA | {"rope_parameters": EIGHTFOLD}),
    ("query_pre_attn_scalar", GEMMA | {"query_pre_attn_scalar": None}),
    ("'gpt2' is not supported (supported: apertus", of("gpt2")),
    ("model_type", {}),
    ("'mish'", of("llama", hidden_act="mish")),
    ("hidden_size", of("llama", hidden_size=None)),
    ("vocab_size", of("llama", vocab_size="many")),
    ("3 KV heads", of("llama", num_key_value_heads=3)),
]


@pytest.mark.parametrize(("message", "config"), REFUSED)
def test_unsupported_models_are_refused_before_weights_are_read(message, config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    for attempt in (lambda: convert(tmp_path, tmp_path / "out"), lambda: checkpoint.load(tmp_path)):
        with pytest.raises(UnsupportedModelError) as caught:
            attempt()
        assert message in str(caught.value)
        assert str(tmp_path / "config.json") in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_opt_norms_keep_their_precision_under_outliers():
    """Hidden states with a large common offset: E[x^2] - mean^2 would lose three digits."""
    config = config_from_hf(OPT)
    layer = blueprint(config, jnp.float32).layer(random_params(config, jnp.float32)["layers"][0])
    x = (30 + 0.15 * np.random.default_rng(0).normal(size=(5, 48))).astype(np.float32)
    exact = x.astype(np.float64)
    exact -= exact.mean(axis=-1, keepdims=True)
    exact /= np.sqrt(exact.var(axis=-1, keepdims=True) + 1e-5)
    # float32 represents 30 +- 0.15 in steps of 1e-5 of the spread.
    np.testing.assert_allclose(layer.attention_input(jnp.asarray(x)), exact, atol=1e-4)
