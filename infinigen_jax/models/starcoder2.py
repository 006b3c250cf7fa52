"""StarCoder2: LLaMA with LayerNorm, biases, an MLP without gate, and perhaps a sliding window."""

DEFAULTS = {
    "num_key_value_heads": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "norm_epsilon": 1e-5,
    "use_bias": True,
    "tie_word_embeddings": True,
}
SETTINGS = {
    "biases": ("use_bias", "use_bias"),
    "gated": False,
    "layer_norms": True,
    "epsilon": "norm_epsilon",
    "windows": "all",
}
