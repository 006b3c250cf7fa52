"""Phi-3, Phi-3.5 and Phi-4: LLaMA with joined projections; partial rotation, longrope."""

from infinigen_jax.models.base import HFConfig, ModelConfig
from infinigen_jax.models.hf import refuse_unless, relative_from_hf, rope_from_hf

DEFAULTS = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}


def config_from_hf(hf: HFConfig) -> ModelConfig:
    rope = rope_from_hf(hf, partial=True)
    known = rope.kind in ("default", "longrope")
    refuse_unless(known, f"rope type {rope.kind!r} in a phi3 model")
    return relative_from_hf(hf, rope=rope, windows="all")
