"""Granite 4, the dense models: Granite 3 with other names of the MLP, and perhaps no rotation.

Those with experts or Mamba layers have the same `model_type` and are refused.
"""

from infinigen_jax.models import granite
from infinigen_jax.models.base import HFConfig, ModelConfig
from infinigen_jax.models.hf import FULL, per_layer, positive, refuse_unless

DEFAULTS = {"num_local_experts": 8, "shared_intermediate_size": 1024}


def config_from_hf(hf: HFConfig) -> ModelConfig:
    types = per_layer(hf, "layer_types", lambda i: "linear_attention")
    others = [kind for kind in types if kind not in (FULL, "attention")]
    refuse_unless(not others, f"layer type {others and others[0]!r}")
    position = hf.get("position_embedding_type")
    refuse_unless(position in (None, "nope", "rope"), f"position_embedding_type {position!r}")
    width = positive(hf, "shared_intermediate_size")
    ropes = () if position == "rope" else (None,) * len(types)
    hf = hf | {"intermediate_size": width, "layer_types": None}
    return granite.config_from_hf(hf, layer_ropes=ropes)
