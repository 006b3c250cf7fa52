"""Cohere (Command R, Aya): attention and MLP side by side after one LayerNorm without bias.

In Command R+, queries and keys have norms as well, with a scale for each head.
"""

from typing import Any

from infinigen_jax.models.base import HEAD_NORMS, HFConfig, ModelConfig
from infinigen_jax.models.hf import (
    positive,
    positive_number,
    relative_from_hf,
    rope_from_hf,
)

DEFAULTS = {"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True}


def config_from_hf(hf: HFConfig) -> ModelConfig:
    return cohere_from_hf(hf, rope=rope_from_hf(hf, interleaved=True, theta=5e5))


def cohere_from_hf(hf: HFConfig, **settings: Any) -> ModelConfig:
    """Return the configuration of a version of Cohere's models.

    Some files have the real context in `model_max_length`, beyond `max_position_embeddings`.
    """
    most = max(positive(hf, "max_position_embeddings"), positive(hf, "model_max_length", default=1))
    return relative_from_hf(
        hf | {"max_position_embeddings": most},
        norms=("attention_norm", *(HEAD_NORMS if hf.get("use_qk_norm") else ())),
        head_norms="own",
        epsilon="layer_norm_eps",
        layer_norms=True,
        norm_biases=False,
        parallel_mlp=True,
        logit_divisor=1 / positive_number(hf["logit_scale"], "logit_scale"),
        **settings,
    )
