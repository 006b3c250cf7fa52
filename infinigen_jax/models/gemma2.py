"""Gemma 2: LLaMA with norms on both sides of each block, and soft-capped scores and logits."""

from typing import Any

from infinigen_jax.models import llama
from infinigen_jax.models.base import POST_NORMS, PRE_NORMS, HFConfig, ModelConfig
from infinigen_jax.models.hf import (
    FULL,
    SLIDING,
    per_layer,
    positive,
    refuse_unless,
    sliding_windows,
)
from infinigen_jax.models.rope_hf import positive_number

DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}


def config_from_hf(hf: HFConfig, **settings: Any) -> ModelConfig:
    hf = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **hf}
    settings |= {"attention_softcap": _softcap(hf, "attn_logit_softcapping")}
    return gemma_from_hf(hf | {"layer_types": kinds(hf, 2)}, **settings)


def kinds(hf: HFConfig, every: int) -> list[str]:
    """Return the kind of each layer; by default each multiple of `every` has no window."""
    return per_layer(hf, "layer_types", lambda i: SLIDING if (i + 1) % every else FULL)


def gemma_from_hf(hf: HFConfig, **settings: Any) -> ModelConfig:
    """Return the configuration of a version of Gemma that reads `settings` itself."""
    hf = DEFAULTS | {**hf}
    refuse_both_ways(hf)
    activation = hf["hidden_activation"]
    refuse_unless(activation in llama.ACTIVATIONS, f"hidden_activation {activation!r}")
    return llama.relative_from_hf(
        hf | {"hidden_act": activation},
        query_scale=positive_number(hf["query_pre_attn_scalar"], "query_pre_attn_scalar") ** -0.5,
        logit_softcap=_softcap(hf, "final_logit_softcapping"),
        # They are stored minus 1. In two bytes, 1 + scale would lose most of its digits.
        float32_norms=True,
        embedding_scale=positive(hf, "hidden_size") ** 0.5,
        **sliding_windows(hf, hf["sliding_window"]),
        **{"norms": PRE_NORMS + POST_NORMS} | settings,
    )


def refuse_both_ways(hf: HFConfig) -> None:
    """Refuse attention to later tokens."""
    both = hf.get("use_bidirectional_attention")
    refuse_unless(not both, f"use_bidirectional_attention={both}")


def _softcap(hf: HFConfig, name: str) -> float | None:
    value = hf.get(name)
    return None if value is None else positive_number(value, name)
