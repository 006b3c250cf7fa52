"""Gemma 4, the dense models: Gemma 3 whose layers without a window have larger heads, and fewer.

Values are normalised, and in the layers without a window they are the projected keys. Every layer's
output has a factor. Of a model of text and images only the language model is read.
"""

from typing import Any

from infinigen_jax.models import gemma2
from infinigen_jax.models.base import HEAD_NORMS, POST_NORMS, PRE_NORMS, HFConfig, ModelConfig
from infinigen_jax.models.hf import (
    FULL,
    SLIDING,
    kinds,
    positive,
    refuse_unless,
    relative_from_hf,
    ropes_by_kind,
)

DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}


def config_from_hf(hf: HFConfig) -> ModelConfig:
    unified = str(hf["model_type"]).startswith("gemma4_unified")
    sizes = {"sliding_window": 1024, "max_position_embeddings": 262_144}
    if not unified:
        sizes = {"sliding_window": 512, "max_position_embeddings": 131_072}
    hf = sizes | hf
    ropes = hf.get("rope_parameters") or ROPES
    refuse_unless(ropes.keys() >= ROPES.keys(), "one rope for all layers of a gemma4 model")
    embedded = hf.get("hidden_size_per_layer_input", 0 if unified else 256)
    refuse_unless(not embedded, f"hidden_size_per_layer_input={embedded}: embeddings by layer")
    shared = hf.get("num_kv_shared_layers")
    refuse_unless(not shared, f"num_kv_shared_layers={shared}")
    refuse_unless(not hf.get("enable_moe_block"), "mixture of experts (enable_moe_block)")
    if hf.get("use_bidirectional_attention") == "vision":  # among the tokens of an image
        hf["use_bidirectional_attention"] = None
    hf["layer_types"] = types = kinds(hf, lambda i: (i + 1) % 6)
    types[-1] = FULL
    window_shape = positive(hf, "num_key_value_heads"), positive(hf, "head_dim")
    hf |= _whole_layers(hf, types)
    from_keys = bool(hf.get("attention_k_eq_v"))
    if window_shape == (hf["num_key_value_heads"], hf["head_dim"]) and not from_keys:
        window_shape = None
    else:  # `Blueprint.layer` tells layers apart by the size of their heads
        refuse_unless(window_shape[1] != hf["head_dim"], "one head_dim with other differences")
        divides = positive(hf, "num_attention_heads") % window_shape[0] == 0
        refuse_unless(divides, f"num_key_value_heads {window_shape[0]}")
        refuse_unless(window_shape[1] % 2 == 0, f"an odd head size ({window_shape[1]})")
        short = positive(hf, "sliding_window") < positive(hf, "max_position_embeddings")
        refuse_unless(short, "a sliding_window of all positions")
    return relative_from_hf(
        hf,
        activation_setting="hidden_activation",
        norms=PRE_NORMS + POST_NORMS + HEAD_NORMS,
        query_scale=1.0,
        logit_softcap=gemma2.softcap(hf, "final_logit_softcapping"),
        embedding_scale=positive(hf, "hidden_size") ** 0.5,
        windows="listed",
        window_shape=window_shape,
        values_from_keys=from_keys,
        value_norms=True,
        layer_factors=True,
        **ropes_by_kind(hf, types, ropes, 1e4),
        max_positions=positive(hf, "max_position_embeddings"),
    )


def _whole_layers(hf: HFConfig, types: list[str]) -> dict[str, Any]:
    """Return the settings of heads in layers without a window; transformers 5 lists each layer."""
    whole = [str(i) for i, kind in enumerate(types) if kind == FULL]
    listed = hf.get("per_layer_config")
    if listed is None:
        several = hf.get("num_global_key_value_heads") if hf.get("attention_k_eq_v") else None
        heads = hf["num_key_value_heads"] if several is None else several
        return {"head_dim": hf["global_head_dim"], "num_key_value_heads": heads}
    first = listed.get(whole[0]) or {}
    same = listed == ({layer: first for layer in whole} if first else {})
    known = first.keys() <= {"head_dim", "num_key_value_heads"}
    refuse_unless(same and known, "per_layer_config with other differences than between two kinds")
    return first
