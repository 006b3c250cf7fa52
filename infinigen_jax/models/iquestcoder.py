"""IQuest-Coder: LLaMA with its own defaults."""

from infinigen_jax.models.base import HFConfig, ModelConfig
from infinigen_jax.models.hf import refuse_unless
from infinigen_jax.models.llama import config_from_hf as llama_from_hf

DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}


def config_from_hf(hf: HFConfig) -> ModelConfig:
    refuse_unless(hf.get("clip_qkv") is None, f"clip_qkv={hf.get('clip_qkv')}")
    return llama_from_hf(DEFAULTS | {**hf})
