"""EXAONE 4: the norms of OLMo 2 after, and of Qwen 3 within attention.

With sliding windows, layers that attend to all tokens do not rotate queries and keys (NoPE).
"""

from collections.abc import Mapping
from typing import Any

from infinigen_jax.models.base import HEAD_NORMS, POST_NORMS, ModelConfig
from infinigen_jax.models.gemma2 import kinds
from infinigen_jax.models.hf import SLIDING, positive, refuse_unless, sliding_windows
from infinigen_jax.models.llama import relative_from_hf
from infinigen_jax.models.rope_hf import rope_from_hf


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translate a `config.json` of model_type "exaone4"; refuse unsupported settings."""
    defaults = {"sliding_window": 4096, "sliding_window_pattern": 4, "num_key_value_heads": 32}
    hf = {"rms_norm_eps": 1e-5, **defaults, **hf}
    window, period = hf["sliding_window"], 1
    if window is None:
        return relative_from_hf(hf, "exaone4", norms=POST_NORMS + HEAD_NORMS)
    if hf.get("layer_types") is None:
        period = positive(hf, "sliding_window_pattern")
    types = kinds(hf, period)
    rope = rope_from_hf(hf)
    refuse_unless(not rope.varies, f"rope type {rope.kind!r} in an exaone4 model with windows")
    return relative_from_hf(
        hf,
        "exaone4",
        norms=POST_NORMS + HEAD_NORMS,
        rope=rope,
        layer_ropes=tuple(rope if kind == SLIDING else None for kind in types),
        **sliding_windows(hf | {"layer_types": types}, window),
    )
