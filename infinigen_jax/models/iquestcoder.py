"""IQuest-Coder: LLaMA with its own defaults."""

DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}
SETTINGS = {"windows": "refused"}
