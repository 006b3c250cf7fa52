"""Calibration for positions beyond the calibration text. Not in the paper.

Rotary embedding turns queries and keys with their position, and a basis fitted to the first
positions alone degrades beyond them. The moments turn likewise. If the text started D tokens later,
hidden states would be equal (rotary attention depends on distances only), every q would be R_D q,
and E[q^T q] would be R_D E[q^T q] R_D^T. The mean over D from 0 to N - 1 has a closed
form. With a rotated pair as one complex number z_i = x_i + i y_i that turns by w_i per position,

    E[z_i conj(z_j')]  is multiplied by  mean of exp(i D (w_i - w_j))
    E[z_i z_j']        is multiplied by  mean of exp(i D (w_i + w_j))      over D

which is a geometric sum. Computed in NumPy float64, once per model. The factors that a norm applies
to the columns after the rotation do not turn: they are divided out and multiplied in again.
"""

from typing import Any

import numpy as np
from jaxtyping import Float

from infinigen_jax.models.rope import Rope
from infinigen_jax.skew.basis import GuessMoments, Moments
from infinigen_jax.skew.tail_moments import BlockMoments

Factors = float | Float[np.ndarray, " d"]  # on the columns of rotated vectors; not zero


def offsets(rope: Rope | None, max_positions: int, length: int) -> int:
    """Return N, the number of positions where a text of this length can start; at least 1."""
    if rope is None:
        return 1
    reach = rope.original_positions if rope.varies else max_positions
    return max(1, reach - length + 1)


def mean_over_positions(
    moments: Any, rope: Rope, number: int, query: Factors = 1.0, key: Factors = 1.0
) -> Any:
    """Return the mean of moments, of one of the three kinds, over positions 0 .. number - 1."""
    if isinstance(moments, GuessMoments):
        return GuessMoments(*(_mean_products(product, rope, number, query) for product in moments))
    if isinstance(moments, BlockMoments):  # values are not rotated
        turned = _mean_vectors(moments.cross_covariance.swapaxes(1, 2), rope, number, key)
        keys = _mean_products(moments.key_covariance, rope, number, key)
        return BlockMoments(keys, turned.swapaxes(1, 2))
    return Moments(
        query_gram=_mean_products(moments.query_gram, rope, number, query),
        key_gram=_mean_products(moments.key_gram, rope, number, key),
        key_mean=_mean_vectors(moments.key_mean, rope, number, key),
    )


def _mean_products(
    products: Float[np.ndarray, "*k d d"], rope: Rope, number: int, factors: Factors
) -> Float[np.ndarray, "*k d d"]:
    """Return the mean over D of R_D M R_D^T, for products M = E[a^T b] of rotated vectors."""
    order, turns = _pairs(rope, products.shape[-1])
    scale = np.multiply.outer(factors, factors)
    products, p = (products / scale)[..., order, :][..., order], len(turns)
    xx, xy = products[..., :p, :p], products[..., :p, p:]
    yx, yy = products[..., p:, :p], products[..., p:, p:]
    difference = (xx + yy + 1j * (yx - xy)) * _mean_turn(turns[:, None] - turns, number)
    total = (xx - yy + 1j * (yx + xy)) * _mean_turn(turns[:, None] + turns, number)
    upper = np.concatenate([(difference + total).real, (total - difference).imag], axis=-1)
    lower = np.concatenate([(total + difference).imag, (difference - total).real], axis=-1)
    back = np.argsort(order)
    return np.concatenate([upper, lower], axis=-2)[..., back, :][..., back] / 2 * scale


def _mean_vectors(
    vectors: Float[np.ndarray, "*k d"], rope: Rope, number: int, factors: Factors
) -> Float[np.ndarray, "*k d"]:
    """Return the mean over D of R_D v."""
    order, turns = _pairs(rope, vectors.shape[-1])
    x, y = np.split((vectors / factors)[..., order], 2, axis=-1)
    turned = (x + 1j * y) * _mean_turn(turns, number)
    return np.concatenate([turned.real, turned.imag], axis=-1)[..., np.argsort(order)] * factors


def _pairs(rope: Rope, dim: int) -> tuple[np.ndarray, Float[np.ndarray, " half"]]:
    """Return first and second columns of all pairs, and their angles per position, 0 if still."""
    turns = rope.frequencies(dim).astype(np.float64)
    p = len(turns)
    still = np.arange(2 * p, dim).reshape(2, -1)
    halves = [np.append(np.arange(i * p, (i + 1) * p), still[i]) for i in range(2)]
    return np.concatenate(halves), np.append(turns, np.zeros(dim // 2 - p))


def _mean_turn(angle: Float[np.ndarray, "*k"], number: int) -> np.ndarray:
    """Return the mean of exp(i D angle) over D from 0 to number - 1."""
    # The sum of N unit vectors has length sin(N a / 2) / sin(a / 2) and the middle one's direction.
    half = np.remainder(angle + np.pi, 2 * np.pi) / 2 - np.pi / 2
    small = np.abs(half) < 1e-12
    ratio = np.sin(number * half) / np.where(small, 1.0, number * np.sin(half))
    return np.where(small, 1.0, ratio) * np.exp(1j * (number - 1) * half)
