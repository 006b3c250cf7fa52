"""SmolLM3: LLaMA in which every fourth layer does not rotate queries and keys (NoPE)."""

from infinigen_jax.models.base import HFConfig, ModelConfig
from infinigen_jax.models.hf import FULL, SLIDING, per_layer, refuse_unless, sliding_windows
from infinigen_jax.models.llama import relative_from_hf
from infinigen_jax.models.rope_hf import rope_from_hf


def config_from_hf(hf: HFConfig) -> ModelConfig:
    hf = {"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2e6, **hf}
    interval = hf.get("no_rope_layer_interval", 4)
    refuse_unless(type(interval) is int and interval > 0, f"no_rope_layer_interval {interval!r}")
    rotates = per_layer(hf, "no_rope_layers", lambda i: (i + 1) % interval != 0)
    window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
    kinds = [SLIDING if window and not rotated else FULL for rotated in rotates]
    rope = rope_from_hf(hf)
    return relative_from_hf(
        hf,
        layer_ropes=tuple(rope if rotated else None for rotated in rotates),
        **sliding_windows({**hf, "layer_types": hf.get("layer_types") or kinds}, window),
    )
