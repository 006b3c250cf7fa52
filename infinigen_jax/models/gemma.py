"""Gemma 1: LLaMA with scaled embeddings and a GELU, the base of `gemma2`."""

from infinigen_jax.models.base import HFConfig, ModelConfig
from infinigen_jax.models.hf import positive, relative_from_hf

DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True}


def config_from_hf(hf: HFConfig) -> ModelConfig:
    # The first files name the exact GELU, but their models use the approximate one.
    if hf.get("hidden_act", "gelu") == "gelu":
        hf["hidden_act"] = "gelu_pytorch_tanh"
    scale = positive(hf, "hidden_size") ** 0.5
    return relative_from_hf(hf, norms_minus_one=True, embedding_scale=scale)
