"""Mistral and its derivatives, such as Zephyr and OpenHermes: LLaMA, with a window in v0.1."""

from infinigen_jax.models.base import HFConfig, ModelConfig
from infinigen_jax.models.hf import FULL, refuse_unless, sliding_windows
from infinigen_jax.models.llama import relative_from_hf


def config_from_hf(hf: HFConfig) -> ModelConfig:
    window = hf.get("sliding_window", 4096)
    mixed = window and FULL in (hf.get("layer_types") or ())
    refuse_unless(not mixed, "layer_types in a mistral model (model_type ministral has them)")
    hf = {"num_key_value_heads": 8, **hf, "layer_types": None}
    return relative_from_hf(hf, **sliding_windows(hf, window))
