"""OLMo 2: LLaMA with norms after attention and MLP, not before, and on all queries and keys."""

from typing import Any

from infinigen_jax.models import llama
from infinigen_jax.models.base import HEAD_NORMS, POST_NORMS, HFConfig, ModelConfig
from infinigen_jax.models.hf import refuse_sliding_windows

NORMS: dict[str, Any] = {"norms": POST_NORMS + HEAD_NORMS, "joint_head_norms": True}


def config_from_hf(hf: HFConfig) -> ModelConfig:
    refuse_sliding_windows(hf)  # OLMo 3
    hf = {"rms_norm_eps": 1e-5, **hf}
    return llama.relative_from_hf(hf, **NORMS)
