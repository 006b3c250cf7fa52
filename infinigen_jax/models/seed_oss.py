"""Seed-OSS: LLaMA with biases on queries, keys and values, as Qwen 2 has them."""

from infinigen_jax.models.base import HFConfig, ModelConfig
from infinigen_jax.models.hf import refuse_unless
from infinigen_jax.models.llama import relative_from_hf


def config_from_hf(hf: HFConfig) -> ModelConfig:
    hf = {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True, **hf}
    refuse_unless(not hf.get("attention_out_bias"), "attention_out_bias in a seed_oss model")
    return relative_from_hf(hf, output_bias=False)
