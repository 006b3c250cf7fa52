"""Ministral: Mistral with a sliding window in some layers, which the configuration lists."""

from infinigen_jax.models.base import HFConfig, ModelConfig
from infinigen_jax.models.hf import sliding_windows
from infinigen_jax.models.llama import relative_from_hf


def config_from_hf(hf: HFConfig) -> ModelConfig:
    hf = {"num_key_value_heads": 8, **hf}
    return relative_from_hf(hf, **sliding_windows(hf, hf.get("sliding_window", 4096)))
