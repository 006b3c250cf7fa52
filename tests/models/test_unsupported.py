"""Configurations that are refused by name, and norms in float32."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from infinigen_jax.convert.pipeline import convert
from infinigen_jax.errors import UnsupportedModelError
from infinigen_jax.loading import load as checkpoint
from infinigen_jax.models import blueprint, config_from_hf, random_params

LLAMA = tiny.LLAMA | {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GEMMA = LLAMA | {"model_type": "gemma3_text", "head_dim": 12}
PHI = LLAMA | {"model_type": "phi3"}
QWEN = LLAMA | {"model_type": "qwen2"}
OPT = LLAMA | {"model_type": "opt", "ffn_dim": 56}
YARN = {"type": "yarn", "factor": 4.0}
ALPHA = {"type": "dynamic", "factor": 1.0, "alpha": 50.0}
HUNYUAN = LLAMA | {"model_type": "hunyuan_v1_dense", "rope_scaling": ALPHA}
EXAONE = LLAMA | {"model_type": "exaone4", "num_key_value_heads": 2}

REFUSED = {
    "post-norm": (OPT | {"do_layer_norm_before": False}, "do_layer_norm_before"),
    "projected": (OPT | {"word_embed_proj_dim": 32}, "word_embed_proj_dim"),
    "no final norm": (OPT | {"_remove_final_layer_norm": True}, "_remove_final_layer_norm"),
    "rope type": (LLAMA | {"rope_scaling": {"rope_type": "longrope"}}, "'longrope'"),
    "rope in parts": (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    "rope by kind": (LLAMA | {"rope_parameters": {"full_attention": {}}}, "full_attention"),
    "rope of some layers": (
        LLAMA | {"model_type": "smollm3", "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "'dynamic' in smollm3 models",
    ),
    "rope shrunk": (LLAMA | {"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor below 1"),
    "rope twice": (
        LLAMA | {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "yarn"}},
        "rope_scaling that contradicts rope_parameters",
    ),
    "rope twice alike": (
        LLAMA
        | {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}
        | {"rope_scaling": {"type": "linear", "factor": 4.0}},
        "rope_scaling that contradicts rope_parameters",
    ),
    "rope from far": (
        LLAMA | {"rope_scaling": YARN | {"original_max_position_embeddings": 10**12}},
        "original_max_position_embeddings is 1000000000000",
    ),
    "rope to far": (LLAMA | {"rope_scaling": YARN | {"factor": 1e300}}, "a context of"),
    "text missing": ({"model_type": "mistral3"}, "text_config is missing"),
    "growth": (
        LLAMA
        | {"model_type": "ministral3"}
        | {"rope_scaling": {"type": "linear", "factor": 2.0, "llama_4_scaling_beta": 0.1}},
        "llama_4_scaling_beta with rope type 'linear'",
    ),
    "hunyuan without heads": (HUNYUAN | {"num_attention_heads": None}, "num_attention_heads"),
    "hunyuan's base": (HUNYUAN | {"rope_scaling": ALPHA | {"alpha": 1e-300}}, "rope alpha 1e-300"),
    "exaone without window": (EXAONE | {"sliding_window": 0}, "without a sliding_window"),
    "exaone's pattern": (EXAONE | {"sliding_window_pattern": "LGLG"}, "sliding_window_pattern"),
    "rope without factor": (LLAMA | {"rope_scaling": {"type": "linear"}}, "factor"),
    "experts": (LLAMA | {"num_local_experts": 8}, "num_local_experts"),
    "quantised": (LLAMA | {"quantization_config": {"bits": 4}}, "quantization_config"),
    "sliding window": (LLAMA | {"sliding_window": 4096}, "sliding_window"),
    "olmo 3": (LLAMA | {"model_type": "olmo2", "sliding_window": 4096}, "sliding_window"),
    "layer type": (QWEN | {"layer_types": ["chunked_attention"] * 2}, "'chunked_attention'"),
    "layer types missing": (QWEN | {"layer_types": ["full_attention"]}, "1 layer_types"),
    "window missing": (QWEN | {"layer_types": ["sliding_attention"] * 2}, "without a sliding"),
    "mixed mistral": (
        LLAMA | {"model_type": "mistral", "layer_types": ["full_attention"] * 2},
        "model_type ministral",
    ),
    "partial longrope": (
        PHI | {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}},
        "'longrope' for heads of its size",
    ),
    "yarn in phi3": (PHI | {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn' in a phi3"),
    "norms": (LLAMA | {"rms_norm_eps": float("nan")}, "epsilon nan"),
    "gpt-oss": (LLAMA | {"model_type": "gpt_oss"}, "'gpt_oss' is not supported: a mixture"),
    "experts by name": (LLAMA | {"model_type": "mixtral"}, "'mixtral' is not supported: a mixture"),
    "gemma": (LLAMA | {"model_type": "gemma3n"}, "'gemma3n' is not supported: of Gemma, the text"),
    "both ways in the first": (
        LLAMA | {"model_type": "gemma", "use_bidirectional_attention": True},
        "use_bidirectional_attention",
    ),
    "clipped": (LLAMA | {"model_type": "iquestcoder", "clip_qkv": 5.0}, "clip_qkv=5.0"),
    "no positions": (
        LLAMA | {"model_type": "cohere", "max_position_embeddings": None},
        "max_position_embeddings",
    ),
    "norms of heads": (LLAMA | {"model_type": "cohere", "use_qk_norm": True}, "use_qk_norm"),
    "both ways": (GEMMA | {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    "capped gemma 3": (GEMMA | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
    "cap of 0": (GEMMA | {"final_logit_softcapping": 0}, "final_logit_softcapping 0"),
    "one rope": (
        GEMMA | {"rope_parameters": {"rope_type": "linear", "factor": 8.0}},
        "one rope for all layers of a gemma3",
    ),
    "no scalar": (GEMMA | {"query_pre_attn_scalar": None}, "query_pre_attn_scalar"),
    "family": (LLAMA | {"model_type": "gpt2"}, "'gpt2' is not supported (supported: apertus"),
    "no family": ({}, "model_type"),
    "activation": (LLAMA | {"hidden_act": "mish"}, "'mish'"),
    "size missing": (LLAMA | {"hidden_size": None}, "hidden_size"),
    "size not a number": (LLAMA | {"vocab_size": "many"}, "vocab_size"),
    "uneven groups": (LLAMA | {"num_key_value_heads": 3}, "3 KV heads"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_models_are_refused_before_weights_are_read(name, tmp_path):
    config, setting = REFUSED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    for attempt in (lambda: convert(tmp_path, tmp_path / "out"), lambda: checkpoint.load(tmp_path)):
        with pytest.raises(UnsupportedModelError) as caught:
            attempt()
        assert setting in str(caught.value)
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
