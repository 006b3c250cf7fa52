"""OLMo 3: OLMo 2 with a sliding window in three of four layers, which keep the first rotation."""

from infinigen_jax.models.base import HFConfig, ModelConfig
from infinigen_jax.models.gemma2 import kinds
from infinigen_jax.models.hf import FULL, SLIDING, sliding_windows
from infinigen_jax.models.llama import relative_from_hf
from infinigen_jax.models.olmo2 import NORMS
from infinigen_jax.models.rope_hf import ropes_by_kind


def config_from_hf(hf: HFConfig) -> ModelConfig:
    hf = {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096, **hf}
    types = kinds(hf, 4)
    given = dict(hf.get("rope_parameters") or {})
    if SLIDING not in given and FULL not in given:  # some releases wrote one for both kinds
        given = {FULL: given, SLIDING: {"rope_theta": given.get("rope_theta")}}
    return relative_from_hf(
        hf,
        **NORMS,
        **ropes_by_kind(hf, types, given, hf["rope_theta"]),
        **sliding_windows(hf | {"layer_types": types}, hf["sliding_window"]),
    )
