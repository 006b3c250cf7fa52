"""Ministral 3: LLaMA whose queries grow with the log of the position in an extended context."""

from infinigen_jax.models.base import HFConfig, ModelConfig
from infinigen_jax.models.hf import refuse_unless, sliding_windows
from infinigen_jax.models.llama import relative_from_hf
from infinigen_jax.models.rope_hf import positive_number, rope_from_hf

ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def config_from_hf(hf: HFConfig) -> ModelConfig:
    hf = {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, **hf}
    scaling = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    hf = hf | {"layer_types": None} | ({} if scaling else {"rope_parameters": ROPE})
    beta = (scaling or ROPE).get("llama_4_scaling_beta")
    rope = rope_from_hf(hf)
    known = rope.kind in ("llama3", "yarn")  # which have an original context
    refuse_unless(known or not beta, f"llama_4_scaling_beta with rope type {rope.kind!r}")
    return relative_from_hf(
        hf,
        rope=rope,
        query_growth=positive_number(beta, "llama_4_scaling_beta") if beta else 0.0,
        **sliding_windows(hf, hf.get("sliding_window")),
    )
