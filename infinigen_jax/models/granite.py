"""Granite 3 and later, dense: LLaMA with constant factors on embeddings, residuals and logits."""

from typing import Any

from infinigen_jax.models.base import HFConfig, ModelConfig
from infinigen_jax.models.hf import positive_number, relative_from_hf

FACTORS = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "query_scale",
    "logits_scaling": "logit_divisor",
}


def config_from_hf(hf: HFConfig, **settings: Any) -> ModelConfig:
    factors = {ours: positive_number(hf.get(name, 1.0), name) for name, ours in FACTORS.items()}
    return relative_from_hf(hf, **factors, **settings)
