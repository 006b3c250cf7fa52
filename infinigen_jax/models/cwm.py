"""CWM (Code World Model): LLaMA with a sliding window in three of four layers."""

from collections.abc import Mapping
from typing import Any

from infinigen_jax.models.base import ModelConfig
from infinigen_jax.models.hf import FULL, SLIDING, per_layer, sliding_windows
from infinigen_jax.models.llama import relative_from_hf


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translate a `config.json` of model_type "cwm"; refuse unsupported settings."""
    hf = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "sliding_window": 8192, **hf}
    types = per_layer(hf, "layer_types", lambda i: SLIDING if i % 4 else FULL)
    windows = sliding_windows(hf | {"layer_types": types}, hf["sliding_window"])
    return relative_from_hf(hf, "cwm", attention_bias=False, **windows)
