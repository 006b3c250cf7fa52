"""Ministral 3: LLaMA whose queries grow with the log of the position in an extended context."""

from infinigen_jax.models.base import HFConfig, ModelConfig
from infinigen_jax.models.hf import positive_number, refuse_unless, relative_from_hf, rope_from_hf

DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}
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
    scaling = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    if not scaling:
        scaling = hf["rope_parameters"] = ROPE
    beta = scaling.get("llama_4_scaling_beta")
    rope = rope_from_hf(hf)
    known = rope.kind in ("llama3", "yarn")  # which have an original context
    refuse_unless(known or not beta, f"llama_4_scaling_beta with rope type {rope.kind!r}")
    return relative_from_hf(
        hf,
        rope=rope,
        query_growth=positive_number(beta, "llama_4_scaling_beta") if beta else 0.0,
        windows="all",
    )
