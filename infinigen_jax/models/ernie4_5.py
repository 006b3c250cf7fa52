"""ERNIE 4.5, dense: LLaMA with neighbouring columns as the pairs of the rotation."""

DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
}
SETTINGS = {"biases": ("use_bias", "use_bias"), "interleaved": True}
