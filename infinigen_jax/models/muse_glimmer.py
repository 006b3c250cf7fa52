"""Muse Glimmer: LLaMA with gated attention, and windows in three of four layers.

The other layers do not rotate queries and keys (NoPE). Embeddings, queries and keys have norms
without scales. Of a model of text and images only the language model is read.
"""

from jaxtyping import Array, Float, Int

from infinigen_jax.models import gemma2, llama
from infinigen_jax.models.base import POST_NORMS, PRE_NORMS, HFConfig, ModelConfig
from infinigen_jax.models.hf import (
    kinds,
    per_layer,
    positive,
    positive_number,
    refuse_unless,
    relative_from_hf,
    rope_from_hf,
)

DEFAULTS = {
    "vocab_size": 202_048,
    "hidden_size": 6656,
    "intermediate_size": 19_968,
    "num_hidden_layers": 52,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_activation": "silu",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "post_norm_eps": 1e-8,
    "bos_token_id": 200_000,
    "eos_token_id": 200_001,
    "sliding_window": 2048,
    "final_logit_softcapping": 20.0,
    "qk_scale_factor": 3.87,
    "output_multiplier": 26**-0.5,
}


def config_from_hf(hf: HFConfig) -> ModelConfig:
    layers = positive(hf, "num_hidden_layers")
    hf["layer_types"] = kinds(hf, lambda i: (layers - 1 - i) % 4)
    rope = rope_from_hf(hf)
    bases = per_layer(hf, "layer_rope_theta", lambda i: rope.theta if (layers - 1 - i) % 4 else 0)
    several = [base for base in bases if base not in (0, rope.theta)]
    refuse_unless(not several, f"layer_rope_theta {several and several[0]} next to {rope.theta:g}")
    factor = positive_number(hf["qk_scale_factor"], "qk_scale_factor")
    multiplier = positive_number(hf["output_multiplier"], "output_multiplier")
    return relative_from_hf(
        hf,
        activation_setting="hidden_activation",
        attention_gates=True,
        norms=PRE_NORMS + POST_NORMS,
        head_norms="bare",
        norms_minus_one=True,
        plain_final_norm=True,
        post_norm_eps=positive_number(hf["post_norm_eps"], "post_norm_eps"),
        query_scale=factor * positive(hf, "head_dim") ** -0.5,
        logit_divisor=1 / multiplier,
        logit_softcap=gemma2.softcap(hf, "final_logit_softcapping"),
        windows="listed",
        layer_ropes=tuple(rope if base else None for base in bases),
    )


class Embedding(llama.Embedding):
    def embed(self, tokens: Int[Array, "*b"], positions: Int[Array, "*b"]) -> Float[Array, "*b e"]:
        return llama.of_unit_mean_square(self.tokens(tokens), self.config.norm_eps)
