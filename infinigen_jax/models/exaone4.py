"""EXAONE 4: the norms of OLMo 2 after, and of Qwen 3 within attention.

With sliding windows, layers that attend to all tokens do not rotate queries and keys (NoPE).
"""

from typing import Any

from infinigen_jax.models.base import HEAD_NORMS, POST_NORMS, HFConfig, ModelConfig
from infinigen_jax.models.gemma2 import kinds
from infinigen_jax.models.hf import SLIDING, positive, sliding_windows
from infinigen_jax.models.llama import relative_from_hf
from infinigen_jax.models.rope import Rope
from infinigen_jax.models.rope_hf import rope_from_hf


def config_from_hf(hf: HFConfig) -> ModelConfig:
    defaults = {"sliding_window": 4096, "sliding_window_pattern": 4, "num_key_value_heads": 32}
    hf = {"rms_norm_eps": 1e-5, **defaults, **hf}
    windows = {}
    if hf["sliding_window"] is not None:
        windows = rotated_in_windows(hf, rope_from_hf(hf))
    return relative_from_hf(hf, norms=POST_NORMS + HEAD_NORMS, **windows)


def rotated_in_windows(hf: HFConfig, rope: Rope) -> dict[str, Any]:
    """Return the settings of windows and of rotations, which only layers with a window have."""
    listed = hf.get("layer_types") is not None
    types = kinds(hf, 1 if listed else positive(hf, "sliding_window_pattern"))
    ropes = tuple(rope if kind == SLIDING else None for kind in types)
    windows = sliding_windows({**hf, "layer_types": types}, hf["sliding_window"])
    return {"rope": rope, "layer_ropes": ropes} | windows
