"""Correction of the predicted query: a second W_Q, fitted to calibration text. Not in the paper.

Layer l's attention input x approximates the input y of layer l+1. A least-squares map
y ~ x W + w improves the approximation. It folds into the query projection and adds no
operation at run time:

    W^ = W W_Q        b^ = w W_Q + b

The map is shrunk towards the identity, not towards zero: in directions without data the input is
used unchanged. The strength is chosen on the end of the text, which is held out, so the result is
no worse there than the plain input with a constant. Computed in NumPy float64, once per model.
"""

from typing import NamedTuple

import jax
import numpy as np
import scipy.linalg
from jaxtyping import Float

Matrix = np.ndarray | jax.Array

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, np.inf)  # relative to the mean eigenvalue of Cov(x)
HELD_OUT = 4  # one token in HELD_OUT, at the end of the text, is held out to choose the ridge


class Projection(NamedTuple):
    """Query projection for an input other than the layer's own.

    `ridge` is the selected one of RIDGES; `inf` keeps the layer's own kernel.
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
    """Fit the projection of `inputs` that best approximates the layer's projection of `targets`.

    `inputs` are an earlier layer's normalised inputs for n calibration tokens, as at run time.
    """
    x, y, w = (np.asarray(m, np.float64) for m in (inputs, targets, kernel))
    missing = (y - x) @ w
    train = len(x) - len(x) // HELD_OUT
    fit = _Regression(x[:train], missing[:train])
    ridge = RIDGES[int(np.argmin(fit.squared_errors(x[train:], missing[train:])))]
    del fit
    slope, intercept = _Regression(x, missing).affine(ridge)
    offset = np.zeros(w.shape[1]) if bias is None else np.asarray(bias, np.float64)
    return Projection(w + slope, offset + intercept, float(ridge))


class _Regression:
    """Ridge regression y ~ x, using the smaller of the two Gram matrices."""

    def __init__(self, x: Float[np.ndarray, "n e"], y: Float[np.ndarray, "n c"]):
        self._mean, self._y_mean = x.mean(axis=0), y.mean(axis=0)
        self._x, y = x - self._mean, y - self._y_mean
        self._by_token = x.shape[0] < x.shape[1]
        self._gram = self._x @ self._x.T if self._by_token else self._x.T @ self._x
        self._right = y if self._by_token else self._x.T @ y
        self._scale = np.trace(self._gram) / x.shape[1]

    def squared_errors(
        self, x: Float[np.ndarray, "m e"], y: Float[np.ndarray, "m c"]
    ) -> Float[np.ndarray, " r"]:
        """Return the squared error of a prediction of y for each of RIDGES, up to a constant.

        In the eigenvectors of the Gram matrix a ridge only scales the coefficients, so the errors
        of all ridges cost less than a solution for each.
        """
        x, y = x - self._mean, y - self._y_mean
        values, vectors = np.linalg.eigh(self._gram)
        features = (x @ self._x.T if self._by_token else x) @ vectors
        right = vectors.T @ self._right
        products = (features.T @ features) * (right @ right.T)
        cross = ((features.T @ y) * right).sum(axis=1)
        errors = []
        for ridge in RIDGES:
            damped = np.maximum(values, 0.0) + ridge * self._scale if self._scale else np.inf
            shrunk = np.ones_like(values) / damped
            errors.append(shrunk @ products @ shrunk - 2 * shrunk @ cross)
        return np.array(errors)

    def affine(self, ridge: float) -> tuple[np.ndarray, np.ndarray]:
        """Return slope [e, c] and intercept [c]; a slope of 0 for a ridge of `inf`."""
        if np.isinf(ridge) or self._scale == 0:
            slope = np.zeros((self._x.shape[1], self._right.shape[1]))
        else:
            self._gram.flat[:: len(self._gram) + 1] += ridge * self._scale
            slope = scipy.linalg.solve(self._gram, self._right, assume_a="pos")
            slope = self._x.T @ slope if self._by_token else slope
        return slope, self._y_mean - self._mean @ slope
