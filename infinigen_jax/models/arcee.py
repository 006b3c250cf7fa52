"""Arcee (AFM): LLaMA with an MLP without gate, whose activation is a squared ReLU."""

from infinigen_jax.models.base import HFConfig, ModelConfig
from infinigen_jax.models.llama import relative_from_hf


def config_from_hf(hf: HFConfig) -> ModelConfig:
    hf = {"hidden_act": "relu2", "rms_norm_eps": 1e-5, **hf}
    return relative_from_hf(hf, gated=False)
