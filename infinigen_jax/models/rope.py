"""Rotary position embedding (Su et al., 2021) in the half-split layout of Hugging Face's models."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from infinigen_jax.errors import UnsupportedModelError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Frequencies of the rotation.

    Attributes:
        theta: base of the geometric series of wavelengths.
        kind: "default", "linear" (positions divided by `factor`) or "llama3" (long wavelengths
            divided by `factor`, a smooth transition between the two given frequency factors).
        original_positions: context of the model before it was stretched ("llama3").
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_positions: int = 8192

    def frequencies(self, dim: int) -> np.ndarray:
        """Angle per position of each of the `dim / 2` rotated pairs, float32."""
        inverse = self.theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
        if self.kind == "linear":
            inverse = inverse / self.factor
        elif self.kind == "llama3":
            inverse = self._llama3(inverse)
        return inverse.astype(np.float32)

    def _llama3(self, inverse: np.ndarray) -> np.ndarray:
        turns = self.original_positions * inverse / (2 * math.pi)
        low, high = self.low_frequency_factor, self.high_frequency_factor
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return inverse * (kept + (1.0 - kept) / self.factor)


def rotate(
    x: Float[Array, "*b heads d"], positions: Int[Array, "*b"], rope: Rope
) -> Float[Array, "*b heads d"]:
    """Rotate each pair (i, i + d/2) of every head by position times frequency; float32 inside."""
    turns = positions[..., None, None].astype(jnp.float32)
    frequencies = jnp.asarray(rope.frequencies(x.shape[-1]))
    angles = turns * frequencies.reshape((1,) * (turns.ndim - 1) + (-1,))
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


_KINDS = ("default", "linear", "llama3")


def rope_from_hf(config: Mapping[str, Any]) -> Rope:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    settings = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind not in _KINDS:
        raise UnsupportedModelError(
            f"config.json: rope type {kind!r} is not supported (supported: {', '.join(_KINDS)})"
        )
    if settings.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModelError("config.json: partial_rotary_factor other than 1 is refused")
    theta = settings.get("rope_theta", config.get("rope_theta", 10000.0))
    if kind == "default":
        return Rope(theta=float(theta))
    try:
        factor = float(settings["factor"])
        if kind == "linear":
            return Rope(theta=float(theta), kind=kind, factor=factor)
        return Rope(
            theta=float(theta),
            kind=kind,
            factor=factor,
            low_frequency_factor=float(settings["low_freq_factor"]),
            high_frequency_factor=float(settings["high_freq_factor"]),
            original_positions=int(settings["original_max_position_embeddings"]),
        )
    except KeyError as missing:
        raise UnsupportedModelError(
            f"config.json: rope type {kind!r} without its setting {missing}"
        ) from None
