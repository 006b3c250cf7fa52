"""StarCoder2: LLaMA with LayerNorm, biases, an MLP without gate, and perhaps a sliding window."""

from infinigen_jax.models.base import HFConfig, ModelConfig
from infinigen_jax.models.hf import sliding_windows
from infinigen_jax.models.llama import relative_from_hf

DEFAULTS = {
    "num_key_value_heads": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "norm_epsilon": 1e-5,
    "use_bias": True,
    "tie_word_embeddings": True,
}


def config_from_hf(hf: HFConfig) -> ModelConfig:
    hf = DEFAULTS | {**hf, "layer_types": None}
    return relative_from_hf(
        hf,
        attention_bias=bool(hf["use_bias"]),
        mlp_bias=bool(hf["use_bias"]),
        gated=False,
        layer_norms=True,
        norm_eps=float(hf["norm_epsilon"]),
        **sliding_windows(hf, hf.get("sliding_window")),
    )
