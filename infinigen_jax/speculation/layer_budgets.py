"""Distribution of a model's budget over its layers. Not in the paper.

A conversion measures the loss of each layer at some budgets (`convert.loss`). The layers receive
shares, with the given mean, that minimise the sum of squared relative errors, as if errors of
different layers were independent.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

STEP = 1000  # shares are multiples of 1 / STEP, see `selection.select.budget_fraction`


class Curves(NamedTuple):
    """Relative error of each layer at measured shares of the rows, ascending, in (0, 1)."""

    shares: tuple[float, ...]
    errors: tuple[tuple[float, ...], ...]


def share_out(curves: Curves, layers: Sequence[int], mean: float) -> tuple[float, ...]:
    """Return shares of the rows for these layers, with a mean of at most `mean` and close to it.

    Greedy along the lower convex hull of each layer's squared error, which ends at (1, 0): fetching
    all rows loses nothing. Every layer receives at least the smallest measured share, or `mean` if
    that is smaller. All but one layer receive measured shares.
    """
    least = curves.shares[0]
    if mean <= least:
        return (mean,) * len(layers)
    shares = dict.fromkeys(layers, least)
    left = (mean - least) * len(layers)
    # Steepest first; ties by layer. The pieces of a hull are already in order.
    pieces = [piece for layer in layers for piece in _pieces(curves, layer)]
    for _, layer, length in sorted(pieces, key=lambda piece: piece[:2]):
        gain = min(length, left)
        shares[layer] += gain
        left -= gain
    # Rounded down to a multiple of 1 / STEP.
    return tuple(min(1.0, int(shares[layer] * STEP + 1e-6) / STEP) for layer in layers)


def _pieces(curves: Curves, layer: int) -> list[tuple[float, int, float]]:
    """Return the hull of one layer: (slope, layer, length) of each piece, from left to right."""
    squares = np.square([*curves.errors[layer], 0.0])
    hull: list[tuple[float, float]] = []
    for point in zip([*curves.shares, 1.0], squares.tolist(), strict=True):
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    return [(_slope(a, b), layer, b[0] - a[0]) for a, b in itertools.pairwise(hull)]


def _slope(a: tuple[float, float], b: tuple[float, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])
