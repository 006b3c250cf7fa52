"""ERNIE 4.5, dense: LLaMA with neighbouring columns as the pairs of the rotation."""

from infinigen_jax.models.base import HFConfig, ModelConfig
from infinigen_jax.models.llama import relative_from_hf
from infinigen_jax.models.rope_hf import rope_from_hf

DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
}


def config_from_hf(hf: HFConfig) -> ModelConfig:
    hf = DEFAULTS | {**hf}
    rope = rope_from_hf(hf, interleaved=True)
    bias = bool(hf.get("use_bias", False))
    return relative_from_hf(hf, attention_bias=bias, mlp_bias=bias, rope=rope)
