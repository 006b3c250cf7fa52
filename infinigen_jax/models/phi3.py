"""Phi-3, Phi-3.5 and Phi-4: LLaMA with joined projections; partial rotation, longrope."""

from infinigen_jax.models.base import HFConfig, ModelConfig
from infinigen_jax.models.hf import refuse_unless, sliding_windows
from infinigen_jax.models.llama import relative_from_hf
from infinigen_jax.models.rope_hf import rope_from_hf


def config_from_hf(hf: HFConfig) -> ModelConfig:
    hf = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096, **hf}
    rope = rope_from_hf(hf, partial=True)
    known = rope.kind in ("default", "longrope")
    refuse_unless(known, f"rope type {rope.kind!r} in a phi3 model")
    windows = sliding_windows(hf | {"layer_types": None}, hf.get("sliding_window"))
    return relative_from_hf(hf, rope=rope, **windows)
