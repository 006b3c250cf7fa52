"""StableLM: LLaMA with LayerNorm, a quarter of each head rotated, perhaps a parallel MLP."""

from infinigen_jax.models.base import PRE_NORMS, HFConfig, ModelConfig
from infinigen_jax.models.hf import relative_from_hf

DEFAULTS = {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25}


def config_from_hf(hf: HFConfig) -> ModelConfig:
    parallel = bool(hf.get("use_parallel_residual", False))
    return relative_from_hf(
        hf,
        partial=True,
        norms=PRE_NORMS[:1] if parallel else PRE_NORMS,
        epsilon="layer_norm_eps",
        layer_norms=True,
        biases=("use_qkv_bias", "mlp_bias"),
        output_bias=False,
        parallel_mlp=parallel,
    )
