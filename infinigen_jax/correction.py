"""Correcting the layer-ahead query: a second W_Q, fitted to calibration text. Not in the paper.

Layer l's attention input x stands in for the own input y of layer l+1, or of layer l+2. A
least-squares map y ~ x W + w brings it nearer, and folds into the query projection, so that it
costs no operation at run time:

    W^ = W W_Q        b^ = w W_Q + b

The map is shrunk towards the identity, not towards zero: directions that the text says nothing
about keep the plain input. How strongly is decided on the end of the text, which is held out; the
result is therefore no worse there than the plain input with a constant. Everything is NumPy
float64, once per model.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float

Matrix = np.ndarray | jax.Array

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, np.inf)  # of the mean eigenvalue of Cov(x)
HELD_OUT = 4  # one token of so many


class Projection(NamedTuple):
    """A query projection for another input than the layer's own.

    Attributes:
        kernel: [e, c].
        bias: [c].
        ridge: the one of RIDGES that was chosen; `inf` for the layer's own kernel.
    """

    kernel: np.ndarray
    bias: np.ndarray
    ridge: float


def corrected_projection(
    inputs: Float[Matrix, "n e"],
    targets: Float[Matrix, "n e"],
    kernel: Float[Matrix, "e c"],
    bias: Float[Matrix, " c"] | None = None,
) -> Projection:
    """The projection that brings `inputs` nearest to what the layer makes of its `targets`.

    Args:
        inputs: what there is at run time: an earlier layer's normalised input, of n calibration
            tokens.
        targets: the input that the projection was trained for: the layer's own.
        kernel, bias: the layer's W_Q and its bias.
    """
    x, y, w = (np.asarray(m, np.float64) for m in (inputs, targets, kernel))
    missing = (y - x) @ w
    train = len(x) - len(x) // HELD_OUT
    ridge = np.inf
    if train < len(x):
        fit = _ridge_regression(x[:train], missing[:train])
        errors = [_error(x[train:], missing[train:], *fit(r)) for r in RIDGES]
        ridge = RIDGES[int(np.argmin(errors))]
    slope, intercept = _ridge_regression(x, missing)(ridge)
    offset = np.zeros(w.shape[1]) if bias is None else np.asarray(bias, np.float64)
    return Projection(w + slope, offset + intercept, float(ridge))


def _ridge_regression(
    x: Float[np.ndarray, "n e"], y: Float[np.ndarray, "n c"]
) -> Callable[[float], tuple[np.ndarray, np.ndarray]]:
    """Slope [e, c] and intercept [c] of y ~ x, as a function of the ridge; one decomposition."""
    x_mean, y_mean = x.mean(axis=0), y.mean(axis=0)
    x, y = x - x_mean, y - y_mean
    scale = np.square(x).sum() / x.shape[1]
    if x.shape[0] < x.shape[1]:  # the Gram matrix of tokens is the smaller one
        values, vectors = np.linalg.eigh(x @ x.T)
        left, right = x.T @ vectors, vectors.T @ y
    else:
        values, left = np.linalg.eigh(x.T @ x)
        right = left.T @ (x.T @ y)

    def solve(ridge: float) -> tuple[np.ndarray, np.ndarray]:
        if np.isinf(ridge) or scale == 0:
            return np.zeros((x.shape[1], y.shape[1])), y_mean
        slope = left @ (right / (np.maximum(values, 0.0) + ridge * scale)[:, None])
        return slope, y_mean - x_mean @ slope

    return solve


def _error(x: np.ndarray, y: np.ndarray, slope: np.ndarray, intercept: np.ndarray) -> float:
    return float(np.square(y - intercept - x @ slope).sum())
