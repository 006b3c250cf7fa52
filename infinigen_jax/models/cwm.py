"""CWM (Code World Model): LLaMA with a sliding window in three of four layers."""

from infinigen_jax.models.base import HFConfig, ModelConfig
from infinigen_jax.models.hf import LLAMA3, kinds, positive, relative_from_hf

ENDS = (128001, 128008, 128009)
DEFAULTS = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "sliding_window": 8192}


def config_from_hf(hf: HFConfig) -> ModelConfig:
    if not hf.get("rope_scaling") and not hf.get("rope_parameters"):
        hf["rope_scaling"] = LLAMA3 | {"factor": 16.0}
    if hf.get("eos_token_id") is None:
        hf["eos_token_id"] = [token for token in ENDS if token < positive(hf, "vocab_size")]
    hf["layer_types"] = kinds(hf, lambda i: i % 4)
    return relative_from_hf(hf, theta=1e6, attention_bias=False, windows="listed")
