"""Reader of the rotary embedding in Hugging Face's `config.json`."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from infinigen_jax.errors import UnsupportedModelError
from infinigen_jax.models.base import HFConfig
from infinigen_jax.models.hf import FULL, SLIDING, positive, refuse_unless
from infinigen_jax.models.rope import KINDS, Rope

LLAMA3 = {  # without its factor
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def rope_from_hf(
    hf: HFConfig,
    *,
    partial: bool = False,
    interleaved: bool = False,
    theta: float = 10000.0,
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
    refuse_unless(share == 1 or (partial and share < 1), f"partial_rotary_factor {share:g}")
    theta = settings.get("rope_theta") or hf.get("rope_theta") or theta
    theta = positive_number(theta, "rope_theta")
    refuse_unless(theta > 1, f"rope_theta {theta:g}")
    name = "original_max_position_embeddings"
    original = int(hf.get(name) or settings.get(name) or positions)
    positive({name: original}, name)
    read = {
        "linear": _stretched,
        "dynamic": _dynamic,
        "llama3": _llama3,
        "yarn": _yarn,
        "longrope": _longrope,
    }
    try:
        scaling = read[kind](settings, original, positions) if kind != "default" else {}
    except KeyError as missing:
        raise UnsupportedModelError(
            f"config.json: rope type {kind!r} without its setting {missing}"
        ) from None
    return Rope(theta=theta, kind=kind, share=share, interleaved=interleaved, **scaling)


def ropes_by_kind(
    hf: HFConfig,
    kinds: Sequence[str],
    given: Mapping[str, Any],
    window_theta: float,
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


def stretched_positions(rope: Rope, positions: int) -> int:
    """Return the longest supported sequence; some kinds extend `positions`, the original one."""
    if rope.kind in ("linear", "dynamic"):
        return round(positions * rope.factor)
    if rope.kind == "yarn":
        return max(positions, round(rope.original_positions * rope.factor))
    return positions


def _stretched(settings: Mapping[str, Any], original: int, positions: int) -> dict[str, Any]:
    factor = positive_number(settings["factor"], "rope factor")
    refuse_unless(factor >= 1, f"a rope factor below 1 ({factor:g})")
    return {"factor": factor}


def _dynamic(settings: Mapping[str, Any], original: int, positions: int) -> dict[str, Any]:
    return _stretched(settings, original, positions) | {"original_positions": positions}


def _llama3(settings: Mapping[str, Any], original: int, positions: int) -> dict[str, Any]:
    low = positive_number(settings["low_freq_factor"], "low_freq_factor")
    high = positive_number(settings["high_freq_factor"], "high_freq_factor")
    refuse_unless(high > low, f"high_freq_factor {high:g} with low_freq_factor {low:g}")
    return _stretched(settings, original, positions) | {
        "original_positions": original,
        "low_frequency_factor": low,
        "high_frequency_factor": high,
    }


def _yarn(settings: Mapping[str, Any], original: int, positions: int) -> dict[str, Any]:
    if settings["factor"] is None:
        settings = {**settings, "factor": positions / original}
    scaling = _stretched(settings, original, positions)
    fast = positive_number(settings.get("beta_fast") or 32.0, "beta_fast")
    slow = positive_number(settings.get("beta_slow") or 1.0, "beta_slow")
    attention = settings.get("attention_factor")
    if attention is None:
        attention = _yarn_attention(settings, scaling["factor"])
    return scaling | {
        "original_positions": original,
        "fast_turns": fast,
        "slow_turns": slow,
        "truncate": bool(settings.get("truncate", True)),
        "attention_factor": positive_number(attention, "attention_factor"),
    }


def _yarn_attention(settings: Mapping[str, Any], factor: float) -> float:
    """Return 0.1 ln(factor) + 1 (equation 22 of the YaRN paper) or DeepSeek's ratio of two such."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0

    above, below = settings.get("mscale"), settings.get("mscale_all_dim")
    return scale(float(above)) / scale(float(below)) if above and below else scale(1.0)


def _longrope(settings: Mapping[str, Any], original: int, positions: int) -> dict[str, Any]:
    factor = settings.get("factor")
    factor = positions / original if factor is None else positive_number(factor, "rope factor")
    attention = settings.get("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    factors = {
        f"{name}s": tuple(positive_number(value, name) for value in settings[name])
        for name in ("short_factor", "long_factor")
    }
    return factors | {
        "factor": factor,
        "original_positions": original,
        "attention_factor": positive_number(attention, "attention_factor"),
    }


def positive_number(value: Any, name: str) -> float:
    """Read a positive finite number; refuse others by name."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    refuse_unless(0 < number < math.inf, f"{name} {value}")
    return number
