"""Gemma 3, text: Gemma 2 with norms on queries and keys, and two rotary embeddings.

Layers with a sliding window have another base than layers that attend to all tokens. Of a model of
text and images (model_type "gemma3") only the language model is read.
"""

from infinigen_jax.models import gemma2
from infinigen_jax.models.base import HEAD_NORMS, POST_NORMS, PRE_NORMS, HFConfig, ModelConfig
from infinigen_jax.models.hf import FULL, kinds, positive, refuse_unless, ropes_by_kind

# With sizes that the configuration of a language model within a larger one leaves out.
DEFAULTS = gemma2.OF_BOTH | {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "max_position_embeddings": 131_072,
    "sliding_window_pattern": 6,
    "rope_theta": 1e6,
    "bos_token_id": 2,
    "eos_token_id": 1,
}


def config_from_hf(hf: HFConfig) -> ModelConfig:
    softcap = hf.get("attn_logit_softcapping")
    refuse_unless(not softcap, f"attn_logit_softcapping={softcap} in a gemma3 model")
    period = positive(hf, "sliding_window_pattern")
    hf["layer_types"] = types = kinds(hf, lambda i: (i + 1) % period)
    given = hf.get("rope_parameters") or {}
    refuse_unless(not given or FULL in given, "one rope for all layers of a gemma3 model")
    return gemma2.gemma_from_hf(
        hf,
        norms=PRE_NORMS + POST_NORMS + HEAD_NORMS,
        **ropes_by_kind(hf, types, given, hf.get("rope_local_base_freq", 1e4)),
        max_positions=positive(hf, "max_position_embeddings"),
    )
