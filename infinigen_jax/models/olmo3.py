"""OLMo 3: OLMo 2 with a sliding window in three of four layers, which keep the first rotation."""

from typing import Any

from infinigen_jax.models import olmo2
from infinigen_jax.models.base import HFConfig, ModelConfig
from infinigen_jax.models.hf import FULL, SLIDING, kinds, relative_from_hf, ropes_by_kind

DEFAULTS = olmo2.DEFAULTS | {"rope_theta": 5e5, "sliding_window": 4096}
SETTINGS = olmo2.SETTINGS | {"windows": "listed"}


def config_from_hf(hf: HFConfig, **settings: Any) -> ModelConfig:
    hf["layer_types"] = types = kinds(hf, lambda i: (i + 1) % 4)
    given = dict(hf.get("rope_parameters") or {})
    if SLIDING not in given and FULL not in given:  # some releases wrote one for both kinds
        given = {FULL: given, SLIDING: {"rope_theta": given.get("rope_theta")}}
    return relative_from_hf(hf, **settings, **ropes_by_kind(hf, types, given, hf["rope_theta"]))
