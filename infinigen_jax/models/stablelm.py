"""StableLM: LLaMA with LayerNorm, a quarter of each head rotated, perhaps a parallel MLP."""

from infinigen_jax.models.base import PRE_NORMS, HFConfig, ModelConfig
from infinigen_jax.models.hf import refuse_unless
from infinigen_jax.models.llama import relative_from_hf
from infinigen_jax.models.rope_hf import rope_from_hf

DEFAULTS = {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25}


def config_from_hf(hf: HFConfig) -> ModelConfig:
    hf = DEFAULTS | {**hf}
    refuse_unless(not hf.get("qk_layernorm"), "qk_layernorm=true in a stablelm model")
    parallel = bool(hf.get("use_parallel_residual", False))
    return relative_from_hf(
        hf,
        rope=rope_from_hf(hf, partial=True),
        norms=PRE_NORMS[:1] if parallel else PRE_NORMS,
        norm_eps=float(hf["layer_norm_eps"]),
        layer_norms=True,
        attention_bias=bool(hf.get("use_qkv_bias", False)),
        output_bias=False,
        parallel_mlp=parallel,
    )
