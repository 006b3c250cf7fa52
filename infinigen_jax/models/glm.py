"""GLM-4, first version: LLaMA with biases as in Qwen 2, and half of each head rotated.

Pairs of the rotation are neighbouring columns, and the gate and up projections are stored joined.
"""

from typing import Any

from infinigen_jax.models.base import HFConfig, ModelConfig
from infinigen_jax.models.llama import relative_from_hf
from infinigen_jax.models.rope_hf import rope_from_hf

DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}


def config_from_hf(hf: HFConfig, **settings: Any) -> ModelConfig:
    hf = DEFAULTS | {**hf}
    rope = rope_from_hf(hf, partial=True, interleaved=True)
    return relative_from_hf(hf, rope=rope, output_bias=False, **settings)
