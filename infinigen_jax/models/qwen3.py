"""Qwen 3, dense: LLaMA with a norm on each head's query and key, before the rotation."""

from infinigen_jax.models import llama
from infinigen_jax.models.base import HEAD_NORMS, PRE_NORMS, HFConfig, ModelConfig
from infinigen_jax.models.qwen2 import qwen_windows


def config_from_hf(hf: HFConfig) -> ModelConfig:
    hf = {"head_dim": 128, **hf}
    norms = PRE_NORMS + HEAD_NORMS
    return llama.relative_from_hf(hf, norms=norms, **qwen_windows(hf))
