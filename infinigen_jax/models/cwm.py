"""CWM (Code World Model): LLaMA with a sliding window in three of four layers."""

from infinigen_jax.models.base import HFConfig, ModelConfig
from infinigen_jax.models.hf import FULL, SLIDING, per_layer, positive, sliding_windows
from infinigen_jax.models.llama import relative_from_hf
from infinigen_jax.models.rope_hf import LLAMA3, rope_from_hf

ENDS = (128001, 128008, 128009)
DEFAULTS = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "sliding_window": 8192}


def config_from_hf(hf: HFConfig) -> ModelConfig:
    hf = DEFAULTS | {**hf}
    if not hf.get("rope_scaling") and not hf.get("rope_parameters"):
        hf["rope_scaling"] = LLAMA3 | {"factor": 16.0}
    if hf.get("eos_token_id") is None:
        hf["eos_token_id"] = [token for token in ENDS if token < positive(hf, "vocab_size")]
    types = per_layer(hf, "layer_types", lambda i: SLIDING if i % 4 else FULL)
    windows = sliding_windows(hf | {"layer_types": types}, hf["sliding_window"])
    rope = rope_from_hf(hf, theta=1e6)
    return relative_from_hf(hf, rope=rope, attention_bias=False, **windows)
