"""Gemma 2: LLaMA with norms on both sides of each block, and soft-capped scores and logits."""

from typing import Any

from infinigen_jax.models.base import POST_NORMS, PRE_NORMS, HFConfig, ModelConfig
from infinigen_jax.models.hf import kinds, positive, positive_number, relative_from_hf

OF_BOTH = {  # and of Gemma 3
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
DEFAULTS = OF_BOTH | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


def config_from_hf(hf: HFConfig, **settings: Any) -> ModelConfig:
    hf["layer_types"] = kinds(hf, lambda i: (i + 1) % 2)
    settings |= {"attention_softcap": softcap(hf, "attn_logit_softcapping")}
    return gemma_from_hf(hf, **settings)


def gemma_from_hf(hf: HFConfig, **settings: Any) -> ModelConfig:
    """Return the configuration of a version of Gemma that reads `settings` itself."""
    settings = {"norms": PRE_NORMS + POST_NORMS} | settings
    return relative_from_hf(
        hf,
        activation_setting="hidden_activation",
        query_scale=positive_number(hf["query_pre_attn_scalar"], "query_pre_attn_scalar") ** -0.5,
        logit_softcap=softcap(hf, "final_logit_softcapping"),
        norms_minus_one=True,
        embedding_scale=positive(hf, "hidden_size") ** 0.5,
        windows="listed",
        **settings,
    )


def softcap(hf: HFConfig, name: str) -> float | None:
    """Read a bound of attention scores or logits; None for none."""
    value = hf.get(name)
    return None if value is None else positive_number(value, name)
