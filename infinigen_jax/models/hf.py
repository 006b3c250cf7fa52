"""Reader of Hugging Face's `config.json`: settings and refusals that families share."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from infinigen_jax.errors import InputError, UnsupportedModelError
from infinigen_jax.models.base import ACTIVATIONS, HFConfig, ModelConfig
from infinigen_jax.models.rope import Rope

SLIDING, FULL = "sliding_attention", "full_attention"  # kinds of `layer_types`

# Models of text and images: the usual `model_type` of their language model.
WITH_IMAGES = {
    "apertus1p5": "apertus1p5_text",
    "exaone4_5": "exaone4",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "glm4v": "glm4",
    "mistral3": "mistral",
    "muse_glimmer": "muse_glimmer_text",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
}

# Settings of features that no family implements.
UNSUPPORTED = (
    *("attention_out_bias", "clip_qkv", "qk_layernorm", "use_bidirectional_attention"),
    *("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
)
BIASES = ("attention_bias", "mlp_bias")
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
    if not isinstance(part, dict):
        raise UnsupportedModelError("config.json: text_config is missing, or not an object")
    names = ("eos_token_id", "dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")
    shared = {name: hf[name] for name in names if name in hf}
    if kind == "glm4v":  # whose defaults are not those of glm4
        size = positive(part, "hidden_size") // positive(part, "num_attention_heads")
        shared |= {"rms_norm_eps": 1e-5, "head_dim": size}
    family = str(part.get("model_type") or WITH_IMAGES[kind])
    if family.removesuffix("_text") == kind:
        family = WITH_IMAGES[kind]
    name = family.removesuffix("_text").title().replace("_", "")
    name = "Apertus1p5Text" if kind == "apertus1p5" else name
    described = {"model_type": family, "architectures": [f"{name}ForCausalLM"]}
    return shared | _along_the_text(part) | described


def _along_the_text(hf: HFConfig) -> dict[str, Any]:
    """Return settings without the rotation in three directions, which agree in a text."""
    settings = {**hf}
    for name in settings.keys() & {"rope_scaling", "rope_parameters"}:
        rope = {k: v for k, v in (settings[name] or {}).items() if not k.startswith("mrope_")}
        for kind in rope.keys() & {"type", "rope_type"}:
            rope[kind] = "default" if rope[kind] == "mrope" else rope[kind]
        settings[name] = rope or None
    return settings


@contextlib.contextmanager
def errors_naming(file: Path) -> Iterator[None]:
    """Name a file in the errors of its settings, which may have any type."""
    try:
        yield
    except UnsupportedModelError as error:
        message = str(error).removeprefix("config.json: ")
        raise UnsupportedModelError(f"{file}: {message}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError) as error:
        raise InputError(f"{file}: a setting has the wrong type ({error})") from None


def refuse_unless(condition: Any, setting: str) -> None:
    """Raise UnsupportedModelError naming `setting` unless `condition` holds."""
    if not condition:
        raise UnsupportedModelError(f"config.json: {setting} is not supported")


def relative_from_hf(
    hf: HFConfig,
    *,
    epsilon: str = "rms_norm_eps",
    activation_setting: str = "hidden_act",
    biases: tuple[str, ...] = BIASES,
    windows: Literal["all", "listed", "refused"] | None = None,
    partial: bool = False,
    interleaved: bool = False,
    theta: float = 10000.0,
    **settings: Any,
) -> ModelConfig:
    """Return the configuration of a family with the modules of `llama`.

    Args:
        epsilon, activation_setting: names of the settings of `norm_eps` and `activation`.
        biases: names of the settings of `attention_bias` and `mlp_bias`.
        windows: layers with the window of `sliding_window`: "all", or those "listed" in
            `layer_types`, or "refused"; None to ignore it.
        partial, interleaved, theta: of `rope_from_hf`.
        settings: fields of ModelConfig that the family reads itself.
    """
    common = common_settings(hf, mlp="intermediate_size")
    if windows == "refused":
        refuse_sliding_windows(hf)
    elif windows:
        settings |= _sliding_windows(hf if windows == "listed" else hf | {"layer_types": None})
    activation = hf.get(activation_setting, "silu")
    known = activation in ACTIVATIONS or "activation" in settings
    refuse_unless(known, f"{activation_setting} {activation!r}")
    rope = settings.get("rope") or rope_from_hf(
        hf, partial=partial, interleaved=interleaved, theta=theta
    )
    if ropes := settings.get("layer_ropes"):  # their frequencies are fixed
        varying = [each.kind for each in (rope, *ropes) if each is not None and each.varies]
        where = f"in {hf.get('model_type')} models"
        refuse_unless(not varying, f"rope type {varying and varying[0]!r} {where}")
    refuse_unless(rope.fits(common["head_dim"]), f"rope type {rope.kind!r} for heads of its size")
    most = common["max_positions"]
    if rope.kind in ("linear", "dynamic"):
        most = round(most * rope.factor)
    elif rope.kind == "yarn":
        most = max(most, round(rope.original_positions * rope.factor))
    refuse_unless(most <= LARGEST, f"a context of {most} tokens")
    read = {n: bool(hf.get(x, False)) for n, x in zip(BIASES, biases, strict=True)}
    read |= {"tie_embeddings": bool(hf.get("tie_word_embeddings", False)), "rope": rope}
    read |= {"activation": activation, "norm_eps": float(hf.get(epsilon, 1e-6))}
    settings = common | {"max_positions": most} | read | settings
    if settings.get("sliding_window", 0) >= settings["max_positions"]:
        # Treat it as no window: such layers are cached on the host like any other.
        settings |= {"sliding_window": None, "sliding_layers": ()}
    return ModelConfig(**settings)


def refuse_sliding_windows(hf: HFConfig) -> None:
    """Refuse sliding windows, for families without them."""
    window = hf.get("sliding_window") if hf.get("use_sliding_window", True) else None
    refuse_unless(not window, f"sliding-window attention (sliding_window={window})")


def _sliding_windows(hf: HFConfig) -> dict[str, Any]:
    """Return `sliding_window` and `sliding_layers` of ModelConfig."""
    window = hf.get("sliding_window")
    types = kinds(hf, lambda i: window)
    strange = [kind for kind in types if kind not in (SLIDING, FULL)]
    refuse_unless(not strange, f"layer type {strange[0] if strange else None!r}")
    layers = tuple(i for i, kind in enumerate(types) if kind == SLIDING)
    if not layers:
        return {}
    refuse_unless(window, f"layer type {SLIDING!r} without a sliding_window")
    return {"sliding_window": positive(hf, "sliding_window"), "sliding_layers": layers}


def kinds(hf: HFConfig, slides: Callable[[int], Any]) -> list[str]:
    """Return the kind of each layer; without `layer_types`, `slides` says which have a window."""
    return per_layer(hf, "layer_types", lambda i: SLIDING if slides(i) else FULL)


def rotated_in_windows(hf: HFConfig, rope: Rope) -> dict[str, Any]:
    """Return `rope` and `layer_ropes`: only layers with a window rotate; list their kinds in hf."""
    listed = hf.get("layer_types") is not None
    every = 1 if listed else positive(hf, "sliding_window_pattern")
    hf["layer_types"] = types = kinds(hf, lambda i: (i + 1) % every)
    return {"rope": rope, "layer_ropes": tuple(rope if x == SLIDING else None for x in types)}


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
    for name in UNSUPPORTED:
        given = f"{name}={hf.get(name)}"
        what = f"mixture of experts ({given})" if "experts" in name else given
        refuse_unless(not hf.get(name), what)
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
        "bos_id": _token(hf.get("bos_token_id"), "bos_token_id", vocabulary),
        "eos_ids": end_tokens(hf, vocabulary),
    }


def end_tokens(hf: HFConfig, vocabulary: int) -> tuple[int, ...]:
    """Return the tokens of `eos_token_id` in config.json or generation_config.json."""
    name = "eos_token_id"
    listed = hf.get(name)
    if not isinstance(listed, list):
        listed = [listed]
    tokens = (_token(value, name, vocabulary) for value in listed)
    return tuple(token for token in tokens if token is not None)


def _token(value: Any, name: str, vocabulary: int) -> int | None:
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < vocabulary:
        raise UnsupportedModelError(
            f"config.json: {name} is {value!r}; it must be a token id below {vocabulary}"
        )
    return value


def positive(hf: HFConfig, name: str, default: int | None = None, most: int = LARGEST) -> int:
    """Read a whole number from 1 to `most`; refuse others, and a missing one without default."""
    value = hf.get(name)
    value = default if value is None else value
    if type(value) is not int or not 1 <= value <= most:
        shown = "missing" if value is None else repr(value)
        raise UnsupportedModelError(
            f"config.json: {name} is {shown}; it must be a whole number from 1 to {most:,}"
        )
    return value


def positive_number(value: Any, name: str) -> float:
    """Read a positive finite number; refuse others by name."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    refuse_unless(0 < number < math.inf, f"{name} {value}")
    return number


# Of `models.rope`.
KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
LLAMA3 = {  # without its factor
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def rope_from_hf(
    hf: HFConfig, *, partial: bool = False, interleaved: bool = False, theta: float = 10000.0
) -> Rope:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    Args:
        partial: whether the family may rotate only a part of each head.
        theta: the family's base where none is given.
    """
    positions = positive(hf, "max_position_embeddings")
    former, settings = (dict(hf.get(n) or {}) for n in ("rope_scaling", "rope_parameters"))
    same = not (former and settings) or _kind(former) == _kind(settings)
    same = same and all(former[name] == settings[name] for name in former.keys() & settings.keys())
    refuse_unless(same, "rope_scaling that contradicts rope_parameters")
    settings = former | settings
    nested = [name for name, value in settings.items() if isinstance(value, Mapping)]
    refuse_unless(not nested, f"separate rope_parameters for {', '.join(nested)}")
    kind = _kind(settings)
    if kind not in KINDS:
        raise UnsupportedModelError(
            f"config.json: rope type {kind!r} is not supported (supported: {', '.join(KINDS)})"
        )
    share = settings.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    share = 1.0 if share is None else positive_number(share, "partial_rotary_factor")
    partial = partial or kind == "proportional"
    refuse_unless(share == 1 or (partial and share < 1), f"partial_rotary_factor {share:g}")
    theta = settings.get("rope_theta") or hf.get("rope_theta") or theta
    theta = positive_number(theta, "rope_theta")
    refuse_unless(theta > 1, f"rope_theta {theta:g}")
    name = "original_max_position_embeddings"
    original = positive({name: int(hf.get(name) or settings.get(name) or positions)}, name)
    try:
        scaling = _scaling(kind, settings, original, positions)
    except KeyError as missing:
        raise UnsupportedModelError(
            f"config.json: rope type {kind!r} without its setting {missing}"
        ) from None
    return Rope(theta=theta, kind=kind, share=share, interleaved=interleaved, **scaling)


def ropes_by_kind(
    hf: HFConfig, kinds: Sequence[str], given: Mapping[str, Any], window_theta: float
) -> dict[str, Any]:
    """Return `rope` and `layer_ropes` of ModelConfig, if layers with a window have another rope.

    `given` has the `rope_parameters` by kind. Layers with a window have the base `window_theta` and
    unscaled frequencies.
    """
    former = {
        SLIDING: {"rope_theta": window_theta},
        FULL: {"rope_theta": hf.get("rope_theta"), "rope_scaling": hf.get("rope_scaling")},
    }
    ropes = {}
    for kind, settings in former.items():
        settings |= {"max_position_embeddings": hf.get("max_position_embeddings")}
        ropes[kind] = rope_from_hf(settings | {"rope_parameters": given.get(kind)})
    return {"rope": ropes[FULL], "layer_ropes": tuple(map(ropes.get, kinds))}


def _kind(settings: Mapping[str, Any]) -> str:
    kind = settings.get("rope_type") or settings.get("type") or "default"
    return "longrope" if kind == "su" else kind  # its first name


def _scaling(
    kind: str, settings: Mapping[str, Any], original: int, positions: int
) -> dict[str, Any]:
    """Return the fields of a Rope of this kind; `original` is the context before its extension."""
    if kind == "default":
        return {}
    if kind == "proportional":
        return {"factor": positive_number(settings.get("factor") or 1.0, "rope factor")}
    factor = settings.get("factor") if kind == "longrope" else settings["factor"]
    if factor is None and kind in ("yarn", "longrope"):
        factor = positions / original
    factor = positive_number(factor, "rope factor")
    refuse_unless(factor >= 1 or kind == "longrope", f"a rope factor below 1 ({factor:g})")
    fields: dict[str, Any] = {"factor": factor}
    if kind != "linear":
        fields["original_positions"] = positions if kind == "dynamic" else original
    if kind == "llama3":
        low = positive_number(settings["low_freq_factor"], "low_freq_factor")
        high = positive_number(settings["high_freq_factor"], "high_freq_factor")
        refuse_unless(high > low, f"high_freq_factor {high:g} with low_freq_factor {low:g}")
        fields |= {"low_frequency_factor": low, "high_frequency_factor": high}
    if kind == "yarn":
        fields["fast_turns"] = positive_number(settings.get("beta_fast") or 32.0, "beta_fast")
        fields["slow_turns"] = positive_number(settings.get("beta_slow") or 1.0, "beta_slow")
        fields["truncate"] = bool(settings.get("truncate", True))
    if kind == "longrope":
        for name in ("short_factor", "long_factor"):
            fields[f"{name}s"] = tuple(positive_number(value, name) for value in settings[name])
    if kind in ("yarn", "longrope"):
        sharpness = settings.get("attention_factor")
        if sharpness is None:
            sharpness = _sharpness(kind, settings, factor, original)
        fields["attention_factor"] = positive_number(sharpness, "attention_factor")
    return fields


def _sharpness(kind: str, settings: Mapping[str, Any], factor: float, original: int) -> float:
    """Return the factor on rotated queries and keys."""
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0

    def of(weight: Any) -> float:
        return 0.1 * float(weight) * math.log(factor) + 1.0

    # Equation 22 of the YaRN paper, or DeepSeek's ratio of two such.
    above, below = settings.get("mscale"), settings.get("mscale_all_dim")
    return of(above) / of(below) if above and below else of(1.0)
