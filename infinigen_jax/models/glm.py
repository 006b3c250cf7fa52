"""GLM-4, first version: LLaMA with biases as in Qwen 2, and half of each head rotated.

Pairs of the rotation are neighbouring columns, and the gate and up projections are stored joined.
"""

DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
SETTINGS = {"partial": True, "interleaved": True, "output_bias": False}
