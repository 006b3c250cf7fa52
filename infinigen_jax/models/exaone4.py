"""EXAONE 4: the norms of OLMo 2 after, and of Qwen 3 within attention.

With sliding windows, layers that attend to all tokens do not rotate queries and keys (NoPE).
"""

from infinigen_jax.models.base import HEAD_NORMS, POST_NORMS, HFConfig, ModelConfig
from infinigen_jax.models.hf import relative_from_hf, rope_from_hf, rotated_in_windows

DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "num_key_value_heads": 32,
}


def config_from_hf(hf: HFConfig) -> ModelConfig:
    norms = POST_NORMS + HEAD_NORMS
    if hf["sliding_window"] is None:
        return relative_from_hf(hf, norms=norms)
    ropes = rotated_in_windows(hf, rope_from_hf(hf))
    return relative_from_hf(hf, norms=norms, windows="listed", **ropes)
