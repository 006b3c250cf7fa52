"""Hunyuan, dense: Qwen 3 with norms on queries and keys after the rotation instead of before."""

import dataclasses
import math

from infinigen_jax.models.base import HEAD_NORMS, PRE_NORMS, HFConfig, ModelConfig
from infinigen_jax.models.hf import (
    positive,
    positive_number,
    refuse_unless,
    relative_from_hf,
    rope_from_hf,
)

DEFAULTS = {"rms_norm_eps": 1e-5}


def config_from_hf(hf: HFConfig) -> ModelConfig:
    rope = rope_from_hf(hf)
    scaling = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if rope.kind == "dynamic" and scaling.get("alpha"):
        # A constant that stretches the base, despite the type's name.
        alpha = positive_number(scaling["alpha"], "rope alpha")
        sizes = positive(hf, "hidden_size"), positive(hf, "num_attention_heads")
        dim = positive(hf, "head_dim", sizes[0] // sizes[1])
        theta = rope.theta * alpha ** (dim / max(1, dim - 2))
        refuse_unless(1 < theta < math.inf, f"rope alpha {alpha:g}")
        rope = dataclasses.replace(rope, kind="default", theta=theta, factor=1.0)
    settings = {"norms": PRE_NORMS + HEAD_NORMS, "norm_after_rotation": True}
    return relative_from_hf(hf, rope=rope, **settings)
