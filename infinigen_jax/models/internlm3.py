"""InternLM3: LLaMA with its own names of the settings of biases."""

from infinigen_jax.models.base import HFConfig, ModelConfig
from infinigen_jax.models.hf import refuse_unless, relative_from_hf

DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5}


def config_from_hf(hf: HFConfig) -> ModelConfig:
    bias = bool(hf.get("bias", hf.get("mlp_bias", False)))
    attention = bool(hf.get("qkv_bias", hf.get("attention_bias", False)))
    refuse_unless(attention == bias, "qkv_bias that differs from bias")
    return relative_from_hf(hf, attention_bias=bias, mlp_bias=bias)
