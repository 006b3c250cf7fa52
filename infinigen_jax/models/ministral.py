"""Ministral: Mistral with a sliding window in some layers, which the configuration lists."""

DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096}
SETTINGS = {"windows": "listed"}
