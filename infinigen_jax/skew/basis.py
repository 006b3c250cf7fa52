"""Skewing (section 4.2 of the InfiniGen paper): a basis in which few columns hold the scores.

For an orthogonal A, (q A) . (k A) = q . k. With A = V of the SVD Q = U S V^T of the calibration
queries, Q A has orthogonal columns of descending energy s^2. The leading r columns are therefore
the best choice of r for the queries, and the partial query is a prefix slice. V is computed as the
eigenvectors of Q^T Q, which is accumulated over the text, so memory does not grow with its length.

Each KV head has one basis, from the stacked queries of its group. The group shares the keys, so a
basis per query head would break the identity. All functions here are pure functions of arrays, in
NumPy float64; they run once per model, offline.
"""

from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float

Matrix = np.ndarray | jax.Array  # argument type; results are np.ndarray

QUERY_RIDGE = 1e-4  # relative to the mean eigenvalue, for the inverse roots
KEY_RIDGE = 1e-5


class Moments(NamedTuple):
    """Means over calibration tokens, per KV head, of queries and keys as in the dot product.

    Attributes:
        query_gram: [k, d, d], mean over tokens and the group's heads of q^T q.
        key_gram: [k, d, d], mean of k^T k.
        key_mean: [k, d], mean of k.
    """

    query_gram: np.ndarray
    key_gram: np.ndarray
    key_mean: np.ndarray

    @property
    def key_covariance(self) -> np.ndarray:
        """Covariance of the keys [k, d, d]."""
        return self.key_gram - self.key_mean[:, :, None] * self.key_mean[:, None, :]


def svd_basis(statistics: Moments) -> tuple[Float[np.ndarray, "k d d"], Float[np.ndarray, "k d"]]:
    """Return the paper's basis (section 4.2): right singular vectors of the stacked queries.

    Returns:
        A [k, d, d], orthogonal even if the queries span fewer than d dimensions, columns by
        descending energy; and the mean energies of a query, s^2 / n of n queries, [k, d].
    """
    energies, basis = np.linalg.eigh(statistics.query_gram)
    energies, basis = energies[:, ::-1], basis[:, :, ::-1]
    return _fix_signs(basis), np.maximum(energies, 0.0)


def balanced_basis(
    statistics: Moments,
) -> tuple[Float[np.ndarray, "k d d"], Float[np.ndarray, "k d d"]]:
    """Return factors that weigh queries and keys alike: the best rank-r scores for every r.

    With S = E[q^T q] and Sigma = Cov(k), both with a small ridge, U D V^T = S^(1/2) Sigma^(1/2):

        B = S^(-1/2) U D^(1/2)      C = Sigma^(-1/2) V D^(1/2)      B C^T = I

    (q B) . ((k - mean) C) over the first r columns is the rank-r score of least expected squared
    error, by Eckart-Young, for queries and keys drawn independently. The omitted constant
    q . mean is equal for all keys of a query. Not in the paper.

    Returns:
        B and C, each [k, d, d]. The variance of column i of both is D_i, descending.
    """
    query_root, query_inverse = _roots(statistics.query_gram, QUERY_RIDGE)
    return _factors(query_root, query_inverse, statistics)


class GuessMoments(NamedTuple):
    """Means over calibration tokens of a predicted query h and the true query q, per KV head.

    Attributes:
        gram: [k, d, d], mean over tokens and the group's heads of h^T h.
        cross: [k, d, d], mean of h^T q.
    """

    gram: np.ndarray
    cross: np.ndarray


def guess_moments(
    guesses: Float[Matrix, "t h d"], queries: Float[Matrix, "t h d"], kv_heads: int
) -> GuessMoments:
    h, q = (_by_kv_head(x, kv_heads) for x in (guesses, queries))
    count = h.shape[1]
    return GuessMoments(h.swapaxes(1, 2) @ h / count, h.swapaxes(1, 2) @ q / count)


def _by_kv_head(x: Float[Matrix, "t h d"], kv_heads: int) -> Float[np.ndarray, "k tg d"]:
    grouped = np.asarray(x, np.float64).reshape(x.shape[0], kv_heads, -1, x.shape[2])
    return grouped.swapaxes(0, 1).reshape(kv_heads, -1, x.shape[2])


def reduced_rank_basis(
    statistics: Moments, guess: GuessMoments
) -> tuple[Float[np.ndarray, "k d d"], Float[np.ndarray, "k d d"]]:
    """Return the factors of `balanced_basis` for a query h that predicts the true query q.

    With S = E[h^T h], R = E[h^T q] and Sigma = Cov(k), U D V^T = S^(-1/2) R Sigma^(1/2):

        B = S^(-1/2) U D^(1/2)      C = Sigma^(-1/2) V D^(1/2)      B C^T = S^-1 R

    Over the first r columns, (h B) . ((k - mean) C) is the rank-r score of least expected squared
    distance to the true score, for queries independent of keys. Directions in which the prediction
    is poor receive little weight. Not in the paper.

    Returns:
        B and C, each [k, d, d]. The residual of r columns is tr(E[q^T q] Sigma) minus the sum of
        the first r squares of D, which descends.
    """
    _, guess_inverse = _roots(guess.gram, QUERY_RIDGE)
    return _factors(guess_inverse @ guess.cross, guess_inverse, statistics)


def _factors(
    root: np.ndarray, inverse: np.ndarray, statistics: Moments
) -> tuple[np.ndarray, np.ndarray]:
    """Return B and C of `root` Sigma^(1/2) = U D V^T, with S^(-1/2) as `inverse`."""
    key_root, key_inverse = _roots(statistics.key_covariance, KEY_RIDGE)
    u, singular, vt = np.linalg.svd(root @ key_root)
    v, scale = vt.swapaxes(1, 2), np.sqrt(singular)[:, None, :]
    return inverse @ u * scale, key_inverse @ v * scale


def absorb(
    weight: Float[Matrix, "*e width"], basis: Float[Matrix, "k d d"]
) -> Float[np.ndarray, "*e width"]:
    """Fold a basis into a projection: W' = W A and b' = b A (section 4.2), head by head.

    For models without rotary embedding, where the dot product follows the projection directly.

    Args:
        weight: kernel [inputs, heads * d] or bias [heads * d], for queries or keys; heads is a
            multiple of k, and consecutive heads share a KV head.
    """
    w, a = np.asarray(weight, np.float64), np.asarray(basis, np.float64)
    kv_heads, size, _ = a.shape
    heads = w.reshape(*w.shape[:-1], kv_heads, -1, size)
    return np.einsum("...kgd,kdc->...kgc", heads, a, optimize=True).reshape(w.shape)


def _roots(matrix: np.ndarray, ridge: float) -> tuple[np.ndarray, np.ndarray]:
    """Return square root and inverse square root of a batch of covariances plus a ridge."""
    values, vectors = np.linalg.eigh(matrix)
    mean = values.mean(axis=-1, keepdims=True)
    # A head with only zero vectors has no scale; any positive value works.
    floor = ridge * np.where(mean > 0, mean, 1.0)
    root = np.sqrt(np.maximum(values, 0.0) + floor)
    transposed = vectors.swapaxes(1, 2)
    return (vectors * root[:, None, :]) @ transposed, (vectors / root[:, None, :]) @ transposed


def _fix_signs(basis: np.ndarray) -> np.ndarray:
    """Make the largest entry of each column positive, so that a conversion is reproducible."""
    largest = np.take_along_axis(basis, np.abs(basis).argmax(axis=1, keepdims=True), axis=1)
    return basis * np.where(largest < 0, -1.0, 1.0)
