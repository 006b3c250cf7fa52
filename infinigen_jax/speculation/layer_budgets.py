"""A budget of the model shared out among its layers. Not in the paper.

Layers differ in what they lose with few rows, and a conversion measures it at some budgets
(`convert.loss`). The layers get those shares of the given mean that lose least in sum: squared
relative errors are summed, as if each layer's were independent of the others'.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LAYER_BUDGETS = ("auto", "equal", "calibrated")
STEP = 1000  # shares are multiples of 1 / STEP, see `selection.budget_fraction`


class Curves(NamedTuple):
    """What each layer of a model loses by its share of the rows.

    Attributes:
        shares: ascending, in (0, 1).
        errors: of each layer, the relative error at each of the shares.
    """

    shares: tuple[float, ...]
    errors: tuple[tuple[float, ...], ...]


def share_out(curves: Curves, layers: Sequence[int], mean: float) -> tuple[float, ...]:
    """Shares of the rows for these layers, whose mean is at most `mean` and nearly that.

    Greedy along the lower convex hull of each layer's squared error, which ends at (1, 0): all rows
    lose nothing. No layer gets less than the smallest share that was measured; a mean that is not
    above that is everybody's. All but one get shares that were measured: few sizes to compile for.
    """
    least = curves.shares[0]
    if mean <= least:
        return (mean,) * len(layers)
    shares = {layer: least for layer in layers}
    left = (mean - least) * len(layers)
    # Steepest first; of equal ones the first layer's. A hull's own are in order.
    pieces = [piece for layer in layers for piece in _pieces(curves, layer)]
    for _, layer, length in sorted(pieces, key=lambda piece: piece[:2]):
        given = min(length, left)
        shares[layer] += given
        left -= given
    return tuple(_rounded(shares[layer]) for layer in layers)


def _pieces(curves: Curves, layer: int) -> list[tuple[float, int, float]]:
    """The hull of one layer: (slope, layer, length) of each piece, from left to right."""
    squares = np.square([*curves.errors[layer], 0.0])
    hull: list[tuple[float, float]] = []
    for point in zip([*curves.shares, 1.0], squares.tolist(), strict=True):
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    pairs = zip(hull, hull[1:], strict=False)
    return [(_slope(a, b), layer, b[0] - a[0]) for a, b in pairs]


def _slope(a: tuple[float, float], b: tuple[float, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])


def _rounded(share: float) -> float:
    """Down to a multiple of 1 / STEP."""
    return min(1.0, int(share * STEP + 1e-6) / STEP)
