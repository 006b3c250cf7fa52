"""OPT, the pre-norm sizes: LayerNorm, learned positions, multi-head attention with biases, ReLU.

Of the published sizes only opt-350m normalises after each block and projects its embeddings; it is
refused by name.
"""

from typing import Any

from flax import nnx
from jaxtyping import Array, Float, Int

from infinigen_jax.models import llama
from infinigen_jax.models.base import ACTIVATIONS, HFConfig, ModelConfig
from infinigen_jax.models.hf import common_settings, refuse_sliding_windows, refuse_unless

POSITION_OFFSET = 2  # rows 0 and 1 of OPT's position table are not positions


def config_from_hf(hf: HFConfig) -> ModelConfig:
    settings = common_settings(hf, mlp="ffn_dim")
    refuse_sliding_windows(hf)
    refuse_unless(hf.get("do_layer_norm_before", True), "do_layer_norm_before=false (opt-350m)")
    projected = hf.get("word_embed_proj_dim") or settings["hidden_size"]
    refuse_unless(projected == settings["hidden_size"], f"word_embed_proj_dim {projected}")
    refuse_unless(not hf.get("_remove_final_layer_norm", False), "_remove_final_layer_norm=true")
    affine = hf.get("layer_norm_elementwise_affine", True)
    refuse_unless(affine, "layer_norm_elementwise_affine=false")
    activation = hf.get("activation_function", "relu")
    refuse_unless(activation in ACTIVATIONS, f"activation_function {activation!r}")
    kv_heads = settings["num_kv_heads"]
    refuse_unless(kv_heads == settings["num_heads"], "grouped KV heads in an OPT model")
    return ModelConfig(
        norm_eps=1e-5,
        activation=activation,
        gated=False,
        layer_norms=True,
        attention_bias=bool(hf.get("enable_bias", True)),
        mlp_bias=bool(hf.get("enable_bias", True)),
        tie_embeddings=bool(hf.get("tie_word_embeddings", True)),
        **settings,
    )


class Embedding(llama.Embedding):
    def __init__(self, config: ModelConfig, dtype: Any):
        super().__init__(config, dtype)
        kind = {"dtype": dtype, "param_dtype": dtype, "rngs": nnx.Rngs(0)}
        positions = config.max_positions + POSITION_OFFSET
        self.positions = nnx.Embed(positions, config.hidden_size, **kind)

    def embed(self, tokens: Int[Array, "*b"], positions: Int[Array, "*b"]) -> Float[Array, "*b e"]:
        return self.tokens(tokens) + self.positions(positions + POSITION_OFFSET)
