"""Helium: LLaMA with neighbouring columns as the pairs of the rotation."""

from infinigen_jax.models.base import HFConfig, ModelConfig
from infinigen_jax.models.llama import relative_from_hf
from infinigen_jax.models.rope_hf import rope_from_hf

DEFAULTS = {"head_dim": 128, "rms_norm_eps": 1e-8}


def config_from_hf(hf: HFConfig) -> ModelConfig:
    hf = DEFAULTS | {**hf}
    rope = rope_from_hf(hf, interleaved=True, theta=1e5)
    return relative_from_hf(hf, rope=rope, output_bias=False)
