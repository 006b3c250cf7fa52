"""OLMo 3: OLMo 2 with a sliding window in three of four layers, which keep the first rotation."""

from collections.abc import Mapping
from typing import Any

from infinigen_jax.models.base import ModelConfig
from infinigen_jax.models.gemma2 import kinds
from infinigen_jax.models.hf import FULL, SLIDING, refuse_unless, sliding_windows
from infinigen_jax.models.llama import relative_from_hf
from infinigen_jax.models.olmo2 import Embedding, Layer
from infinigen_jax.models.rope import Rope
from infinigen_jax.models.rope_hf import rope_from_hf

__all__ = ["Embedding", "Layer", "config_from_hf"]


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translate a `config.json` of model_type "olmo3"; refuse unsupported settings."""
    hf = {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096, **hf}
    types = kinds(hf, 4)
    ropes = {kind: _rope(hf, kind) for kind in (SLIDING, FULL)}
    return relative_from_hf(
        hf,
        "olmo3",
        rope=ropes[FULL],
        layer_ropes=tuple(ropes.get(kind) for kind in types),
        **sliding_windows(hf | {"layer_types": types}, hf["sliding_window"]),
    )


def _rope(hf: Mapping[str, Any], kind: str) -> Rope:
    """Return the rotary embedding of one kind of layers; only layers without a window scale it."""
    given = dict(hf.get("rope_parameters") or {})
    if SLIDING not in given and FULL not in given:  # of both kinds, as some releases wrote them
        given = {FULL: given, SLIDING: {"rope_theta": given.get("rope_theta")}}
    settings = {
        "rope_theta": hf["rope_theta"],
        "rope_scaling": hf.get("rope_scaling") if kind == FULL else None,
        "rope_parameters": given.get(kind),
        "max_position_embeddings": hf.get("max_position_embeddings"),
    }
    rope = rope_from_hf(settings)
    refuse_unless(not rope.varies, f"rope type {rope.kind!r} in an olmo3 model")
    return rope
