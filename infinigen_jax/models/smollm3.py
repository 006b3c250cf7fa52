"""SmolLM3: LLaMA in which every fourth layer does not rotate queries and keys (NoPE)."""

from infinigen_jax.models.base import HFConfig, ModelConfig
from infinigen_jax.models.hf import kinds, per_layer, refuse_unless, relative_from_hf, rope_from_hf

DEFAULTS = {"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2e6}


def config_from_hf(hf: HFConfig) -> ModelConfig:
    interval = hf.get("no_rope_layer_interval", 4)
    refuse_unless(type(interval) is int and interval > 0, f"no_rope_layer_interval {interval!r}")
    rotates = per_layer(hf, "no_rope_layers", lambda i: (i + 1) % interval != 0)
    window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
    given = hf | {"layer_types": hf.get("layer_types") or None}  # perhaps an empty list
    types = kinds(given, lambda i: window and not rotates[i])
    rope = rope_from_hf(hf)
    ropes = tuple(rope if rotated else None for rotated in rotates)
    hf |= {"sliding_window": window, "layer_types": types}
    return relative_from_hf(hf, layer_ropes=ropes, windows="listed")
