"""Rotary position embedding (Su et al., 2021) in the half-split layout of Hugging Face's models.

Other frequencies extend models beyond the context of their training:

    linear    every frequency divided by `factor` (Chen et al., 2023)
    dynamic   a base that grows with the sequence beyond the model's original context ("NTK-aware",
              r/LocalLLaMA, 2023)
    llama3    low frequencies divided by `factor`, high ones kept (LLaMA 3.1)
    yarn      likewise with a ramp over the pairs, and sharper scores (Peng et al., 2023)

`dynamic` follows transformers: each call of the model uses the base for the sequence length at that
call. All keys of a prompt use the prompt's length, and each later token uses its position. Cached
keys stay unchanged.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Frequencies of the rotary embedding.

    Attributes:
        theta: base of the geometric series of wavelengths.
        kind: one of KINDS.
        factor: ratio of the extended context to the original one; at least 1.
        original_positions: context of the model before its extension ("dynamic", "llama3",
            "yarn").
        low_frequency_factor, high_frequency_factor: turns within the original context between
            which "llama3" interpolates.
        slow_turns, fast_turns: the same for "yarn" (its beta_slow and beta_fast).
        truncate: whether the ramp of "yarn" starts and ends at whole pairs.
        attention_factor: factor on rotated queries and on rotated keys ("yarn").
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_positions: int = 8192
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    slow_turns: float = 1.0
    fast_turns: float = 32.0
    truncate: bool = True
    attention_factor: float = 1.0

    def frequencies(self, dim: int) -> np.ndarray:
        """Return the angle per position of each of the `dim / 2` rotated pairs, float32.

        For kind "dynamic" these are the frequencies within the original context.
        """
        inverse = self.theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
        if self.kind == "linear":
            inverse = inverse / self.factor
        elif self.kind == "llama3":
            inverse = self._llama3(inverse)
        elif self.kind == "yarn":
            inverse = self._yarn(inverse)
        return inverse.astype(np.float32)

    def _llama3(self, inverse: np.ndarray) -> np.ndarray:
        turns = self.original_positions * inverse / (2 * math.pi)
        low, high = self.low_frequency_factor, self.high_frequency_factor
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return inverse * (kept + (1.0 - kept) / self.factor)

    def _yarn(self, inverse: np.ndarray) -> np.ndarray:
        dim = 2 * len(inverse)

        def pair_with(turns: float) -> float:
            """Return the (fractional) pair that makes `turns` within the original context."""
            wavelength = self.original_positions / (turns * 2 * math.pi)
            return dim * math.log(wavelength) / (2 * math.log(self.theta))

        first, last = pair_with(self.fast_turns), pair_with(self.slow_turns)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        # Clip like transformers and the authors: to dim - 1, although pairs end at dim / 2 - 1.
        first, last = max(first, 0), min(last, dim - 1)
        width = last - first if last != first else 0.001
        stretched = np.clip((np.arange(len(inverse)) - first) / width, 0.0, 1.0)
        return inverse * (1.0 - stretched + stretched / self.factor)

    def angles(
        self, positions: Int[Array, "*b"], lengths: Int[Array, "*b"], dim: int
    ) -> Float[Array, "*b p"]:
        """Return the angles of each of the p = `dim / 2` pairs, float32.

        Args:
            lengths: length of each sequence in this call of the model, see `rotate`.
        """
        angles = positions[..., None].astype(jnp.float32) * _as_last(
            self.frequencies(dim), positions.ndim
        )
        if self.kind != "dynamic" or dim == 2:
            return angles
        # Equivalent to the base theta * s^(d / (d-2)), written as a factor on the angles.
        beyond = jnp.maximum(lengths - self.original_positions, 0).astype(jnp.float32)
        growth = jnp.log1p(beyond * (self.factor / self.original_positions))
        exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim - 2)
        return angles * jnp.exp(-growth[..., None] * _as_last(exponents, positions.ndim))


def rotate(
    x: Float[Array, "*b heads d"],
    positions: Int[Array, "*b"],
    rope: Rope,
    lengths: Int[Array, "*b"] | None = None,
) -> Float[Array, "*b heads d"]:
    """Rotate each pair (i, i + d/2) of every head by position times frequency, in float32.

    Args:
        lengths: tokens of each sequence in this call of the model, for kind "dynamic"; by default
            up to and including `positions`, as in a decode step.
    """
    lengths = positions + 1 if lengths is None else lengths
    angles = rope.angles(positions, lengths, x.shape[-1])[..., None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if rope.attention_factor != 1.0:
        cos, sin = cos * rope.attention_factor, sin * rope.attention_factor
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def _as_last(values: np.ndarray, leading: int) -> Float[Array, "*one p"]:
    """Add leading axes so that the values broadcast along the last axis."""
    return jnp.asarray(values).reshape((1,) * leading + (-1,))
