"""Correction of the predicted query: a second W_Q, fitted to calibration text. Not in the paper.

Layer l's attention input x approximates the input y of layer l+1. A least-squares map
y ~ x W + w improves the approximation. It folds into the query projection, so that it adds no
operation at run time:

    W^ = W W_Q        b^ = w W_Q + b

The map is shrunk towards the identity, not towards zero: in directions without data the input is
used unchanged. The strength is chosen on the end of the text, which is held out, so the result is
no worse there than the plain input with a constant. Computed in NumPy float64, once per model.
"""

from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float

Matrix = np.ndarray | jax.Array

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, np.inf)  # relative to the mean eigenvalue of Cov(x)
HELD_OUT = 4  # one token in HELD_OUT is held out


class Projection(NamedTuple):
    """Query projection for an input other than the layer's own.

    Attributes:
        kernel: [e, c].
        bias: [c].
        ridge: selected one of RIDGES; `inf` keeps the layer's own kernel.
        outer: [r, c], weights of the neurons' activations; None without neurons.
    """

    kernel: np.ndarray
    bias: np.ndarray
    ridge: float
    outer: np.ndarray | None = None


def corrected_projection(
    inputs: Float[Matrix, "n e"],
    targets: Float[Matrix, "n e"],
    kernel: Float[Matrix, "e c"],
    bias: Float[Matrix, " c"] | None = None,
    neurons: Float[Matrix, "n r"] | None = None,
) -> Projection:
    """Fit the projection of `inputs` that best approximates the layer's projection of `targets`.

    Args:
        inputs: inputs at run time: an earlier layer's normalised input, for n calibration tokens.
        targets: the layer's own inputs, which the projection was trained for.
        kernel, bias: the layer's W_Q and its bias.
        neurons: activations of additional neurons, see `skew.neurons`.
    """
    x, y, w = (np.asarray(m, np.float64) for m in (inputs, targets, kernel))
    missing = (y - x) @ w
    unit, width = 1.0, x.shape[1]
    if neurons is not None:
        h = np.asarray(neurons, np.float64)
        # Scaled to the inputs' variance, so that a ridge affects both equally; neurons that vary
        # most are shrunk least.
        variances = np.mean(np.var(x, axis=0)), np.mean(np.var(h, axis=0))
        unit = np.sqrt(variances[0] / variances[1]) if min(variances) > 0 else 0.0
        x = np.concatenate([x, h * unit], axis=1)
    train = len(x) - len(x) // HELD_OUT
    ridge = np.inf
    if train < len(x):
        fit = _Regression(x[:train], missing[:train])
        held_out = fit.features(x[train:])
        errors = [np.square(missing[train:] - fit.predict(held_out, r)).sum() for r in RIDGES]
        ridge = RIDGES[int(np.argmin(errors))]
    slope, intercept = _Regression(x, missing).affine(ridge)
    offset = np.zeros(w.shape[1]) if bias is None else np.asarray(bias, np.float64)
    outer = None if neurons is None else slope[width:] * unit
    return Projection(w + slope[:width], offset + intercept, float(ridge), outer)


class _Regression:
    """Ridge regression y ~ x, using the smaller of the two Gram matrices.

    Each ridge solves one linear system; all of RIDGES together cost a fraction of an
    eigendecomposition.
    """

    def __init__(self, x: Float[np.ndarray, "n e"], y: Float[np.ndarray, "n c"]):
        self._mean, self._y_mean = x.mean(axis=0), y.mean(axis=0)
        self._x, y = x - self._mean, y - self._y_mean
        self._scale = np.square(self._x).sum() / x.shape[1]
        self._by_token = x.shape[0] < x.shape[1]
        self._gram = self._x @ self._x.T if self._by_token else self._x.T @ self._x
        self._right = y if self._by_token else self._x.T @ y

    def features(self, x: Float[np.ndarray, "m e"]) -> Float[np.ndarray, "m f"]:
        """Return the features that a prediction is linear in."""
        centred = x - self._mean
        return centred @ self._x.T if self._by_token else centred

    def predict(self, features: Float[np.ndarray, "m f"], ridge: float) -> np.ndarray:
        """Return the prediction of y [m, c]; the mean of y for a ridge of `inf`."""
        return self._y_mean + features @ self._coefficients(ridge)

    def affine(self, ridge: float) -> tuple[np.ndarray, np.ndarray]:
        """Return slope [e, c] and intercept [c]."""
        coefficients = self._coefficients(ridge)
        slope = self._x.T @ coefficients if self._by_token else coefficients
        return slope, self._y_mean - self._mean @ slope

    def _coefficients(self, ridge: float) -> Float[np.ndarray, "f c"]:
        if np.isinf(ridge) or self._scale == 0:
            return np.zeros_like(self._right)
        damped = self._gram + np.diag(np.full(len(self._gram), ridge * self._scale))
        return np.linalg.solve(damped, self._right)
