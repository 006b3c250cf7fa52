"""Calibration for positions beyond the calibration text. Not in the paper.

Rotary embedding turns queries and keys with their position, and a basis fitted to the first
positions alone degrades beyond them. The moments, however, turn along. If the text were D tokens
further on, hidden states would be equal (rotary attention depends on distances only), every q would
be R_D q, and E[q^T q] would be R_D E[q^T q] R_D^T. The mean over D from 0 to N - 1 has a closed
form. With a rotated pair as one complex number z_i = x_i + i y_i that turns by w_i per position,

    E[z_i conj(z_j')]  is multiplied by  mean of exp(i D (w_i - w_j))
    E[z_i z_j']        is multiplied by  mean of exp(i D (w_i + w_j))      over D

which is a geometric sum. Computed in NumPy float64, once per model.
"""

import numpy as np
from jaxtyping import Float

from infinigen_jax.models.rope import Rope
from infinigen_jax.skew.basis import GuessMoments, Moments
from infinigen_jax.skew.tail_moments import BlockMoments


def offsets(rope: Rope | None, max_positions: int, length: int) -> int:
    """Return N, the number of positions where a text of this length can start; at least 1."""
    if rope is None:
        return 1
    reach = rope.original_positions if rope.varies else max_positions
    return max(1, reach - length + 1)


def spread_moments(moments: Moments, rope: Rope, number: int) -> Moments:
    """Return the mean of the moments over text positions 0 .. number - 1."""
    turns = _turns(rope, moments.key_sum.shape[-1])
    return moments._replace(
        query_gram=spread_products(moments.query_gram, turns, number),
        key_gram=spread_products(moments.key_gram, turns, number),
        key_sum=spread_sums(moments.key_sum, turns, number),
    )


def spread_blocks(moments: BlockMoments, rope: Rope, number: int) -> BlockMoments:
    """Return the mean of within-block moments over text positions; values do not turn."""
    turns = _turns(rope, moments.key_covariance.shape[-1])
    turned = spread_sums(moments.cross_covariance.swapaxes(1, 2), turns, number)
    return BlockMoments(
        spread_products(moments.key_covariance, turns, number), turned.swapaxes(1, 2)
    )


def spread_guess(guess: GuessMoments, rope: Rope, number: int) -> GuessMoments:
    """Return the mean of a predicted query's moments over text positions."""
    turns = _turns(rope, guess.gram.shape[-1])
    return GuessMoments(*(spread_products(product, turns, number) for product in guess))


def spread_products(
    products: Float[np.ndarray, "*k d d"], turns: Float[np.ndarray, " p"], number: int
) -> Float[np.ndarray, "*k d d"]:
    """Return the mean over D of R_D M R_D^T, for M = E[a^T b] of two kinds of rotated vectors.

    Args:
        products: M.
        turns: angle w per position of each of the p pairs, the leading 2p columns.
        number: number N of positions.
    """
    order, turns = _all_pairs(turns, products.shape[-1])
    if order is not None:
        products = products[..., order, :][..., order]
        spread, back = spread_products(products, turns, number), np.argsort(order)
        return spread[..., back, :][..., back]
    p = len(turns)
    xx, xy = products[..., :p, :p], products[..., :p, p:]
    yx, yy = products[..., p:, :p], products[..., p:, p:]
    difference = (xx + yy + 1j * (yx - xy)) * _mean_turn(turns[:, None] - turns, number)
    total = (xx - yy + 1j * (yx + xy)) * _mean_turn(turns[:, None] + turns, number)
    upper = np.concatenate([(difference + total).real, (total - difference).imag], axis=-1)
    lower = np.concatenate([(total + difference).imag, (difference - total).real], axis=-1)
    return np.concatenate([upper, lower], axis=-2) / 2


def spread_sums(
    sums: Float[np.ndarray, "*k d"], turns: Float[np.ndarray, " p"], number: int
) -> Float[np.ndarray, "*k d"]:
    """Return the mean over D of R_D s."""
    order, turns = _all_pairs(turns, sums.shape[-1])
    if order is not None:
        return spread_sums(sums[..., order], turns, number)[..., np.argsort(order)]
    x, y = np.split(sums, 2, axis=-1)
    turned = (x + 1j * y) * _mean_turn(turns, number)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def _all_pairs(
    turns: Float[np.ndarray, " p"], dim: int
) -> tuple[np.ndarray | None, Float[np.ndarray, " half"]]:
    """Return the angles of all d / 2 pairs, and the columns (i, i + d/2) of each pair i.

    Columns that do not rotate form pairs with the angle 0. The columns are None if all rotate.
    """
    p, half = len(turns), dim // 2
    if p == half:
        return None, turns
    still = np.arange(2 * p, dim).reshape(2, -1)
    first, second = (np.append(np.arange(i * p, (i + 1) * p), still[i]) for i in range(2))
    return np.append(first, second), np.append(turns, np.zeros(half - p))


def _mean_turn(angle: Float[np.ndarray, "*k"], number: int) -> np.ndarray:
    """Return the mean of exp(i D angle) over D from 0 to number - 1."""
    # The sum of N unit vectors has length sin(N a / 2) / sin(a / 2) and the middle one's direction.
    half = np.remainder(angle + np.pi, 2 * np.pi) / 2 - np.pi / 2
    small = np.abs(half) < 1e-12
    ratio = np.sin(number * half) / np.where(small, 1.0, number * np.sin(half))
    return np.where(small, 1.0, ratio) * np.exp(1j * (number - 1) * half)


def _turns(rope: Rope, dim: int) -> np.ndarray:
    return rope.frequencies(dim).astype(np.float64)
