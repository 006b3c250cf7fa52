"""Cohere 2 (Command R7B, Command A): Cohere with windows in three of four layers.

The other layers do not rotate queries and keys (NoPE).
"""

from collections.abc import Mapping
from typing import Any

from infinigen_jax.models.base import ModelConfig
from infinigen_jax.models.cohere import cohere_from_hf
from infinigen_jax.models.exaone4 import rotated_in_windows
from infinigen_jax.models.rope_hf import rope_from_hf


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    hf = {"sliding_window": 4096, "sliding_window_pattern": 4, **hf}
    rope = rope_from_hf(hf, interleaved=True)
    return cohere_from_hf(hf, "cohere2", **rotated_in_windows(hf, rope))
