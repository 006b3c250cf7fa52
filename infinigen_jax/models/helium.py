"""Helium: LLaMA with neighbouring columns as the pairs of the rotation."""

DEFAULTS = {"head_dim": 128, "rms_norm_eps": 1e-8}
SETTINGS = {"interleaved": True, "theta": 1e5, "output_bias": False}
