"""HyperCLOVA X: Granite with norms after attention and MLP as well, and multiplied logits."""

import dataclasses

from infinigen_jax.models import granite
from infinigen_jax.models.base import POST_NORMS, PRE_NORMS, HFConfig, ModelConfig


def config_from_hf(hf: HFConfig) -> ModelConfig:
    norms = PRE_NORMS + POST_NORMS if hf.get("use_post_norm", True) else PRE_NORMS
    given = {name: value for name, value in hf.items() if value is not None}
    config = granite.config_from_hf(given, norms=norms)
    scale = config.query_scale if "attention_multiplier" in given else None
    divisor = 1 / config.logit_divisor
    return dataclasses.replace(config, query_scale=scale, logit_divisor=divisor)
