"""Jais 2: LLaMA with LayerNorm, biases, and an MLP without gate."""

DEFAULTS = {"hidden_act": "relu2", "layer_norm_eps": 1e-5, "attention_bias": True, "mlp_bias": True}
SETTINGS = {"gated": False, "layer_norms": True, "epsilon": "layer_norm_eps"}
