"""Cohere 2 (Command R7B, Command A): Cohere with windows in three of four layers.

The other layers do not rotate queries and keys (NoPE).
"""

from infinigen_jax.models.base import HFConfig, ModelConfig
from infinigen_jax.models.cohere import cohere_from_hf
from infinigen_jax.models.exaone4 import rotated_in_windows
from infinigen_jax.models.rope_hf import rope_from_hf


def config_from_hf(hf: HFConfig) -> ModelConfig:
    hf = {"sliding_window": 4096, "sliding_window_pattern": 4, **hf}
    rope = rope_from_hf(hf, interleaved=True)
    return cohere_from_hf(hf, **rotated_in_windows(hf, rope))
