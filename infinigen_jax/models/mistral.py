"""Mistral and its derivatives, such as Zephyr and OpenHermes: LLaMA, with a window in v0.1."""

from infinigen_jax.models.base import HFConfig, ModelConfig
from infinigen_jax.models.hf import FULL, refuse_unless, relative_from_hf

DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096}


def config_from_hf(hf: HFConfig) -> ModelConfig:
    mixed = hf["sliding_window"] and FULL in (hf.get("layer_types") or ())
    refuse_unless(not mixed, "layer_types in a mistral model (model_type ministral has them)")
    return relative_from_hf(hf, windows="all")
