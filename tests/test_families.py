"""LLaMA's relatives and stretched rotary embeddings against transformers, in float32.

Logits of a whole pass; then through convert, load and the engine, token by token, beside
transformers' own generation with its cache.
"""

import json

import numpy as np
import pytest
from tiny import logits_of, make_tiny

from infinigen_jax import checkpoint
from infinigen_jax.convert import convert

# Two orders of the same float32 sums over at most 64 terms and 4 layers, logits up to about 10.
TOLERANCE = 1e-4

SLIDES = {"use_sliding_window": True, "sliding_window": 7}
MIXED = {
    "sliding_window": 7,
    "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def rope(**settings) -> dict:
    return {"rope_parameters": {"rope_theta": 10000.0} | settings}


MODELS = {
    "mistral": ("mistral", {"sliding_window": None, "num_key_value_heads": 2}),
    "mistral 0.1": ("mistral", {"sliding_window": 7, "num_key_value_heads": 2}),
    "ministral": ("ministral", {**MIXED, "head_dim": 12, "num_key_value_heads": 2}),
    "qwen2": ("qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen2 windows": ("qwen2", {**SLIDES, "max_window_layers": 2}),
    "qwen3": ("qwen3", {"num_key_value_heads": 2, "head_dim": 20}),
    "qwen3 tied": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True}),
    "qwen3 windows": ("qwen3", {"head_dim": 20, "use_sliding_window": True, **MIXED}),
    "linear": ("llama", rope(rope_type="linear", factor=4.0)),
    "dynamic": ("llama", rope(rope_type="dynamic", factor=4.0) | {"max_position_embeddings": 16}),
    "yarn": ("llama", rope(**YARN)),
    "yarn in qwen3": ("qwen3", rope(**YARN) | {"head_dim": 20}),
    "yarn, all settings": (
        "qwen2",
        rope(**YARN, beta_fast=4.0, beta_slow=0.5, truncate=False, attention_factor=1.3),
    ),
    "yarn, two scales": ("llama", rope(**YARN, mscale=0.7, mscale_all_dim=1.2)),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_a_whole_pass(name, tokens, tmp_path):
    family, settings = MODELS[name]
    reference = make_tiny(tmp_path / "source", family, num_hidden_layers=4, **settings)
    model = checkpoint.load(convert(reference.folder, tmp_path / "out", skew="none"), "float32")
    expected = reference.logits(tokens)
    np.testing.assert_allclose(logits_of(model, tokens), expected, atol=TOLERANCE, rtol=0)
