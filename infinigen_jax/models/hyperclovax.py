"""HyperCLOVA X: Granite with norms after attention and MLP as well, and multiplied logits."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from infinigen_jax.models.base import POST_NORMS, PRE_NORMS, ModelConfig
from infinigen_jax.models.granite import granite_from_hf


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    norms = PRE_NORMS + POST_NORMS if hf.get("use_post_norm", True) else PRE_NORMS
    given = {name: value for name, value in hf.items() if value is not None}
    config = granite_from_hf(given, "hyperclovax", norms=norms)
    scale = config.query_scale if "attention_multiplier" in given else None
    divisor = 1 / config.logit_divisor
    return dataclasses.replace(config, query_scale=scale, logit_divisor=divisor)
