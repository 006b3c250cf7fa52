"""Rotary position embedding (Su et al., 2021) in the half-split layout of Hugging Face's models.

Other frequencies extend models beyond the context of their training:

    linear    every frequency divided by `factor` (Chen et al., 2023)
    dynamic   a base that grows with the sequence beyond the model's original context ("NTK-aware",
              r/LocalLLaMA, 2023)
    llama3    low frequencies divided by `factor`, high ones kept (LLaMA 3.1)
    yarn      likewise with a ramp over the pairs, and sharper scores (Peng et al., 2023)
    longrope  a fitted factor for each pair, one set within the original context and another
              beyond it, and sharper scores (Ding et al., 2024)

`proportional` frequencies (Gemma 4) are 0 beyond a share of the pairs, and may be divided too.
`dynamic` and `longrope` follow transformers: each call of the model uses the frequencies for the
sequence length at that call. All keys of a prompt use the prompt's length, and each later token
uses its position. Cached keys stay unchanged.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

PerToken = Int[Array, "*b"]  # a number for each token: itself, its position, its text's length


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Frequencies of the rotary embedding.

    Attributes:
        theta: base of the geometric series of wavelengths.
        kind: "default" or one of the above.
        factor: ratio of the extended context to the original one; at least 1.
        original_positions: context of the model before its extension ("dynamic", "llama3",
            "yarn", "longrope").
        low_frequency_factor, high_frequency_factor: turns within the original context between
            which "llama3" interpolates.
        slow_turns, fast_turns: the same for "yarn" (its beta_slow and beta_fast).
        truncate: whether the ramp of "yarn" starts and ends at whole pairs.
        attention_factor: factor on rotated queries and on rotated keys ("yarn", "longrope").
        short_factors, long_factors: divisors of the frequencies of "longrope", within the
            original context and beyond it.
        share: share of a head's columns that rotate: the leading ones, or with "proportional" the
            first pairs.
        interleaved: whether a pair is two neighbouring columns rather than one of each half.
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
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    share: float = 1.0
    interleaved: bool = False

    @property
    def varies(self) -> bool:
        """Whether the frequencies depend on the length of the sequence."""
        return self.kind in ("dynamic", "longrope")

    def columns(self, dim: int) -> int:
        """Return the number of rotated columns of a head."""
        return dim if self.kind == "proportional" else int(dim * self.share)

    def fits(self, dim: int) -> bool:
        """Return whether the rotated columns form pairs, each with its factors."""
        pairs, rest = divmod(self.columns(dim), 2)
        factors = (self.short_factors, self.long_factors) if self.kind == "longrope" else ()
        return pairs > 0 and not rest and all(len(each) == pairs for each in factors)

    def frequencies(self, dim: int, *, long: bool = False) -> np.ndarray:
        """Return the angle per position of each of the p = `columns(dim) / 2` pairs, float32.

        If the frequencies vary, these are the ones within the original context; with `long`, those
        of longrope beyond it.
        """
        dim = self.columns(dim)
        inverse = self.theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
        if self.kind == "linear":
            inverse = inverse / self.factor
        elif self.kind == "llama3":
            inverse = self._llama3(inverse)
        elif self.kind == "proportional":
            inverse = inverse / self.factor
            inverse[int(self.share * dim) // 2 :] = 0.0
        elif self.kind == "yarn":
            inverse = self._yarn(inverse)
        elif self.kind == "longrope":
            inverse = inverse / np.array(self.long_factors if long else self.short_factors)
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

    def angles(self, positions: PerToken, lengths: PerToken, dim: int) -> Float[Array, "*b p"]:
        """Return the angles of each of the p pairs, float32; for `lengths` see `rotate`."""
        frequencies = as_last(self.frequencies(dim), positions.ndim)
        if self.kind == "longrope":
            long = as_last(self.frequencies(dim, long=True), positions.ndim)
            beyond = (lengths > self.original_positions)[..., None]
            frequencies = jnp.where(beyond, long, frequencies)
        angles = positions[..., None].astype(jnp.float32) * frequencies
        dim = self.columns(dim)
        if self.kind != "dynamic" or dim == 2:
            return angles
        # Equivalent to the base theta * s^(d / (d-2)), written as a factor on the angles.
        beyond = jnp.maximum(lengths - self.original_positions, 0).astype(jnp.float32)
        growth = jnp.log1p(beyond * (self.factor / self.original_positions))
        exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim - 2)
        return angles * jnp.exp(-growth[..., None] * as_last(exponents, positions.ndim))


def rotate(
    x: Float[Array, "*b heads d"], positions: PerToken, rope: Rope, lengths: PerToken | None = None
) -> Float[Array, "*b heads d"]:
    """Rotate each pair (i, i + p) of every head by position times frequency, in float32.

    Interleaved pairs (2i, 2i + 1) become pairs (i, i + p): scores are the same. Frequencies that
    vary depend on `lengths`, the tokens of each sequence in this call of the model; by default up
    to and including `positions`, as in a decode step.
    """
    lengths = positions + 1 if lengths is None else lengths
    angles = rope.angles(positions, lengths, x.shape[-1])
    return _turned(x, angles, rope.attention_factor, rope.interleaved)


class Rotation(nnx.Module):
    """Rotary embedding of a layer as parameters: layers with different ones share a program."""

    def __init__(self, dim: int, interleaved: bool):
        self.interleaved = interleaved
        self.frequencies = nnx.Param(jnp.zeros(dim // 2))
        self.factor = nnx.Param(jnp.ones(1))

    def __call__(
        self, x: Float[Array, "*b heads d"], positions: PerToken
    ) -> Float[Array, "*b heads d"]:
        frequencies = as_last(self.frequencies[...], positions.ndim)
        angles = positions[..., None].astype(jnp.float32) * frequencies
        return _turned(x, angles, as_last(self.factor[...], x.ndim - 1), self.interleaved)


def rotation(rope: Rope | None, dim: int) -> dict[str, Float[Array, " p"]]:
    """Return the parameters of a Rotation; without a rope it changes nothing."""
    frequencies = np.zeros(dim // 2, np.float32) if rope is None else rope.frequencies(dim)
    factor = 1.0 if rope is None else rope.attention_factor
    return {"frequencies": jnp.asarray(frequencies), "factor": jnp.full(1, factor, jnp.float32)}


def _turned(
    x: Float[Array, "*b heads d"],
    angles: Float[Array, "*b p"],
    factor: float | Float[Array, "*one 1"],
    interleaved: bool,
) -> Float[Array, "*b heads d"]:
    """Rotate the leading pairs of every head by their angles, and multiply them by a factor."""
    if interleaved:
        pairs, rest = jnp.split(x, [2 * angles.shape[-1]], axis=-1)
        x = jnp.concatenate([pairs[..., ::2], pairs[..., 1::2], rest], axis=-1)
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    if not isinstance(factor, float) or factor != 1.0:
        cos, sin = cos * factor, sin * factor
    p = angles.shape[-1]
    first, second = (x[..., i * p : (i + 1) * p].astype(jnp.float32) for i in range(2))
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    rotated = rotated.astype(x.dtype)
    if 2 * p == x.shape[-1]:
        return rotated
    return jnp.concatenate([rotated, x[..., 2 * p :]], axis=-1)


def as_last(values: np.ndarray | Array, leading: int) -> Float[Array, "*one p"]:
    """Add axes in front, for `leading + 1` in all, so that values broadcast along the last ones."""
    return jnp.asarray(values).reshape((1,) * (leading + 1 - values.ndim) + values.shape)
