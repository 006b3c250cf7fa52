"""Jais 2: LLaMA with LayerNorm, biases, and an MLP without gate."""

from infinigen_jax.models.base import HFConfig, ModelConfig
from infinigen_jax.models.llama import relative_from_hf

DEFAULTS = {"hidden_act": "relu2", "layer_norm_eps": 1e-5, "attention_bias": True, "mlp_bias": True}


def config_from_hf(hf: HFConfig) -> ModelConfig:
    hf = DEFAULTS | {**hf}
    norms = {"layer_norms": True, "norm_eps": float(hf["layer_norm_eps"])}
    return relative_from_hf(hf, gated=False, **norms)
