"""Arcee (AFM): LLaMA with an MLP without gate, whose activation is a squared ReLU."""

DEFAULTS = {"hidden_act": "relu2", "rms_norm_eps": 1e-5}
SETTINGS = {"gated": False}
