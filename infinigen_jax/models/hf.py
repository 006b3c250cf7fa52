"""Reader of Hugging Face's `config.json`: settings and refusals that all families share."""

from collections.abc import Callable, Mapping
from typing import Any

from infinigen_jax.errors import UnsupportedModelError
from infinigen_jax.models.base import HFConfig

SLIDING, FULL = "sliding_attention", "full_attention"  # kinds of `layer_types`

# Models of text and images: the usual `model_type` of their language model.
WITH_IMAGES = {
    "exaone4_5": "exaone4",
    "gemma3": "gemma3_text",
    "mistral3": "mistral",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
}

MOST_LAYERS = 10_000  # bounds the lists with an entry per layer
LARGEST = (1 << 31) - 1  # bounds all other sizes, which index arrays


def language_model(hf: HFConfig) -> dict[str, Any]:
    """Return the configuration of a language model, which may be part of a larger model."""
    kind = str(hf.get("model_type"))
    if kind not in WITH_IMAGES:
        return {"model_type": None, **hf}
    part = hf.get("text_config")
    if part is None and kind in ("qwen2_vl", "qwen2_5_vl"):  # their first files are flat
        part = {name: value for name, value in hf.items() if name != "vision_config"}
    if not isinstance(part, Mapping):
        raise UnsupportedModelError("config.json: text_config is missing, or not an object")
    names = ("eos_token_id", "dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")
    shared = {name: hf[name] for name in names if name in hf}
    family = str(part.get("model_type") or WITH_IMAGES[kind])
    if family.removesuffix("_text") == kind:
        family = WITH_IMAGES[kind]
    name = f"{family.removesuffix('_text').title()}ForCausalLM"
    return shared | _along_the_text(part) | {"model_type": family, "architectures": [name]}


def _along_the_text(hf: HFConfig) -> dict[str, Any]:
    """Return settings without the rotation in three directions, which agree in a text."""
    settings = {**hf}
    for name in settings.keys() & {"rope_scaling", "rope_parameters"}:
        rope = {k: v for k, v in (settings[name] or {}).items() if not k.startswith("mrope_")}
        for kind in rope.keys() & {"type", "rope_type"}:
            rope[kind] = "default" if rope[kind] == "mrope" else rope[kind]
        settings[name] = rope or None
    return settings


def refuse_unless(condition: Any, setting: str) -> None:
    """Raise UnsupportedModelError naming `setting` unless `condition` holds."""
    if not condition:
        raise UnsupportedModelError(f"config.json: {setting} is not supported")


def refuse_sliding_windows(hf: HFConfig) -> None:
    """Refuse sliding windows, for families without them."""
    window = hf.get("sliding_window") if hf.get("use_sliding_window", True) else None
    refuse_unless(not window, f"sliding-window attention (sliding_window={window})")


def sliding_windows(hf: HFConfig, window: int | None, first: int = 0) -> dict[str, Any]:
    """Return `sliding_window` and `sliding_layers` of ModelConfig.

    `window` is None without one. `first` is the first layer with it if `layer_types` is missing.
    """
    kinds = per_layer(hf, "layer_types", lambda i: SLIDING if window and i >= first else FULL)
    strange = [kind for kind in kinds if kind not in (SLIDING, FULL)]
    refuse_unless(not strange, f"layer type {strange[0] if strange else None!r}")
    layers = tuple(i for i, kind in enumerate(kinds) if kind == SLIDING)
    if not layers:
        return {}
    refuse_unless(window, f"layer type {SLIDING!r} without a sliding_window")
    window = positive({"sliding_window": window}, "sliding_window")
    return {"sliding_window": window, "sliding_layers": layers}


def per_layer(hf: HFConfig, name: str, default: Callable[[int], Any]) -> list[Any]:
    """Return a setting of every layer; `default` gives a layer's if the list is missing."""
    count = positive(hf, "num_hidden_layers", most=MOST_LAYERS)
    values = hf.get(name)
    if values is None:
        return [default(i) for i in range(count)]
    refuse_unless(len(values) == count, f"{len(values)} {name} for {count} layers")
    return list(values)


def common_settings(hf: HFConfig, *, mlp: str) -> dict[str, Any]:
    """Return sizes and special tokens for ModelConfig; `mlp` names the setting of the MLP width.

    Features that no family implements are refused, whatever `model_type` says.
    """
    refuse_unless(not hf.get("quantization_config"), "quantised weights (quantization_config)")
    for name in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"):
        refuse_unless(not hf.get(name), f"mixture of experts ({name}={hf.get(name)})")
    heads = positive(hf, "num_attention_heads")
    hidden = positive(hf, "hidden_size")
    kv_heads = positive(hf, "num_key_value_heads", default=heads)
    refuse_unless(heads % kv_heads == 0, f"{heads} query heads over {kv_heads} KV heads")
    head_dim = positive(hf, "head_dim", default=hidden // heads)
    refuse_unless(head_dim % 2 == 0, f"an odd head size ({head_dim})")
    vocabulary = positive(hf, "vocab_size")
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": positive(hf, mlp),
        "num_layers": positive(hf, "num_hidden_layers", most=MOST_LAYERS),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "max_positions": positive(hf, "max_position_embeddings"),
        "bos_id": _token(hf, "bos_token_id", vocabulary),
        "eos_ids": end_tokens(hf, vocabulary),
    }


def end_tokens(hf: HFConfig, vocabulary: int) -> tuple[int, ...]:
    """Return the tokens of `eos_token_id` in config.json or generation_config.json."""
    name = "eos_token_id"
    listed = hf.get(name)
    if not isinstance(listed, list):
        listed = [listed]
    tokens = (_token({name: value}, name, vocabulary) for value in listed)
    return tuple(token for token in tokens if token is not None)


def _token(hf: HFConfig, name: str, vocabulary: int) -> int | None:
    value = hf.get(name)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < vocabulary:
        raise UnsupportedModelError(
            f"config.json: {name} is {value!r}; it must be a token number below {vocabulary}"
        )
    return value


def positive(hf: HFConfig, name: str, default: int | None = None, most: int = LARGEST) -> int:
    """Read a whole number from 1 to `most`; refuse others, and a missing one without default."""
    value = hf.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        shown = "missing" if value is None else repr(value)
        problem = f"{name} is {shown}; it must be a whole number from 1 to {most:,}"
        raise UnsupportedModelError(f"config.json: {problem}")
    return value
