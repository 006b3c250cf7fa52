"""Cohere 2 (Command R7B, Command A): Cohere with windows in three of four layers.

The other layers do not rotate queries and keys (NoPE).
"""

from infinigen_jax.models import cohere
from infinigen_jax.models.base import HFConfig, ModelConfig
from infinigen_jax.models.hf import rope_from_hf, rotated_in_windows

DEFAULTS = cohere.DEFAULTS | {"sliding_window": 4096, "sliding_window_pattern": 4}


def config_from_hf(hf: HFConfig) -> ModelConfig:
    ropes = rotated_in_windows(hf, rope_from_hf(hf, interleaved=True))
    return cohere.cohere_from_hf(hf, windows="listed", **ropes)
