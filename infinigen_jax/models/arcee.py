"""Arcee (AFM): LLaMA with an MLP without gate, whose activation is a squared ReLU."""

from collections.abc import Mapping
from typing import Any

from infinigen_jax.models.base import ModelConfig
from infinigen_jax.models.llama import relative_from_hf


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    hf = {"hidden_act": "relu2", "rms_norm_eps": 1e-5, **hf}
    return relative_from_hf(hf, "arcee", gated=False)
