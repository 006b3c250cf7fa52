"""Nemotron (Minitron): LayerNorm, an MLP without gate, and half of each head rotated."""

from infinigen_jax.models.base import HFConfig, ModelConfig
from infinigen_jax.models.llama import relative_from_hf
from infinigen_jax.models.rope_hf import rope_from_hf

DEFAULTS = {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5}


def config_from_hf(hf: HFConfig) -> ModelConfig:
    hf = DEFAULTS | {**hf}
    return relative_from_hf(
        hf,
        rope=rope_from_hf(hf, partial=True),
        gated=False,
        layer_norms=True,
        norm_eps=float(hf["norm_eps"]),
        float32_norms=True,  # they are stored minus 1, as in `gemma2`
    )
