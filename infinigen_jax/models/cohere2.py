"""Cohere 2 (Command R7B, Command A): Cohere with windows in three of four layers.

The other layers do not rotate queries and keys (NoPE).
"""

from collections.abc import Mapping
from typing import Any

from infinigen_jax.models.base import ModelConfig
from infinigen_jax.models.cohere import cohere_from_hf
from infinigen_jax.models.gemma2 import kinds
from infinigen_jax.models.hf import SLIDING, positive, refuse_unless, sliding_windows
from infinigen_jax.models.rope_hf import rope_from_hf


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translate a `config.json` of model_type "cohere2"; refuse unsupported settings."""
    hf = {"sliding_window": 4096, "sliding_window_pattern": 4, **hf}
    listed = hf.get("layer_types") is not None
    types = kinds(hf, 1 if listed else positive(hf, "sliding_window_pattern"))
    rope = rope_from_hf(hf, interleaved=True)
    refuse_unless(not rope.varies, f"rope type {rope.kind!r} in a cohere2 model")
    return cohere_from_hf(
        hf,
        "cohere2",
        rope=rope,
        layer_ropes=tuple(rope if kind == SLIDING else None for kind in types),
        **sliding_windows(hf | {"layer_types": types}, hf["sliding_window"]),
    )
