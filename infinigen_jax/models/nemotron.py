"""Nemotron (Minitron): LayerNorm, an MLP without gate, and half of each head rotated."""

DEFAULTS = {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5}
SETTINGS = {
    "partial": True,
    "gated": False,
    "layer_norms": True,
    "epsilon": "norm_eps",
    "norms_minus_one": True,
}
