"""Seed-OSS: LLaMA with biases on queries, keys and values, as Qwen 2 has them."""

DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True}
SETTINGS = {"output_bias": False}
