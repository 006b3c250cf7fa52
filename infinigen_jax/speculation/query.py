"""Prediction, in layer l, of the tokens that layer l+1 will attend to (section 4.3 of the paper).

    a         layer l's normalised input, an approximation of layer l+1's
    q^        layer l+1's query computed from a, in its skewed basis, the first r columns
    k^        the index: layer l+1's cached keys in the same basis, the first r columns
    q^ . k^   the speculated attention logits (`speculation.index.IndexFormat.scores`)

The basis orders its columns by energy, so the most important columns are always the leading ones.

Not in the paper are a prediction from the state after layer l's attention to its resident rows, a
balanced basis (`skew.basis`) and a corrected query (`skew.query_correction`), see
docs/policies-infinigen.md.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from infinigen_jax.errors import ParameterError
from infinigen_jax.models.base import ModelConfig, Params
from infinigen_jax.models.linear import in_full, project, split
from infinigen_jax.models.llama import Layer
from infinigen_jax.models.small_weights import shrink_part, small_dtype
from infinigen_jax.ops.attention import soft_capped

if TYPE_CHECKING:
    from infinigen_jax.loading.load import Model


def choose_basis(model: "Model", basis: str) -> str:
    """Return the basis to use, "svd", "balanced" or "none"; "auto" uses that of the conversion."""
    if basis == "auto":
        return model.skew
    if basis == model.skew or (basis == "svd" and model.svd_bases is not None):
        return basis
    raise ParameterError(
        "basis",
        f"the model was converted with `skew` {model.skew}; convert it again with {basis}",
        basis,
    )


def choose_query(model: "Model", query: str) -> str:
    """Return the query to use; "auto" is the corrected one if the model stores a correction."""
    if query == "auto":
        return "plain" if model.ahead is None else "corrected"
    if query == "corrected" and model.ahead is None:
        remedy = "the model has no calibration for it; convert it again with `skew` balanced"
        raise ParameterError("query", remedy, query)
    return query


def choose_source(model: "Model", query: str, source: str) -> str:
    """Return the source of the prediction; "auto" is the one that the model was converted for."""
    if query == "corrected" and source not in ("auto", model.speculate_from):
        raise ParameterError(
            "speculate_from",
            f"the model's corrected query is for {model.speculate_from}; convert it again for "
            f"{source}, or use `query` plain",
            source,
        )
    return model.speculate_from if source == "auto" else source


def speculation_weights(
    model: "Model",
    layer: int,
    columns: int,
    centred: bool = False,
    basis: str = "auto",
    query: str = "plain",
    true: bool = False,
) -> Params:
    """Return the arrays for speculating a layer, in addition to the model's weights.

    Without rotary positions the basis folds into a query projection of r columns: {"partial":
    {"weight" [h*r, e], "bias" [h*r]}}, and {"key" [k, d, r]} unless the cached keys already are in
    the basis. With rotary positions the basis follows the rotation: {"query" [k, d, r], "key"
    [k, d, r]}; empty if the keys' own leading columns are used. A corrected query's projection
    replaces the layer's: {"ahead": {"weight" [h*d, e], "bias" [h*d]}}. Projections are small
    weights if the layer's is.

    Args:
        centred: whether to add the mean calibration key, if known: "centre" [k, r] in the index's
            coordinates, "mean" [k, d] in those of the cached keys.
        basis, query: of `settings.policy.BASES` and `QUERIES`; "own" needs only the arrays of the
            index.
        true: whether to add the map from the layer's own query to the index's coordinates, if the
            basis changes: "inverse" [k, r, d], the leading rows of the inverse basis. Scores are
            then exact, or with fewer than d columns the part that the columns explain, because the
            columns of a balanced basis are mutually uncorrelated.
    """
    config = model.config
    basis, query = choose_basis(model, basis), choose_query(model, query)
    corrected = projection = None
    if query == "corrected":
        corrected = model.ahead[layer] if model.ahead is not None else None
        assert corrected is not None
        projection = {n: jnp.array(x, model.dtype) for n, x in corrected.projection.items()}
    if basis != model.skew:
        assert model.svd_bases is not None
        pair = model.svd_bases[layer]
    elif basis == "balanced" and corrected is not None:
        pair = corrected.basis
    else:
        pair = model.bases[layer]
    weights = {}
    if pair is not None:
        weights["key"] = pair.key[..., :columns]
    if centred and model.key_mean is not None:
        mean = jnp.asarray(model.key_mean[layer])
        weights["mean"] = mean
        if pair is not None:
            mean = jnp.einsum("kd,kdr->kr", mean, pair.key)
        weights["centre"] = mean[..., :columns]
    if true and pair is not None:
        with jax.default_matmul_precision("highest"):
            # The query basis is the transposed inverse, unless it is for a corrected query.
            known = corrected is None or pair is not corrected.basis
            inverse = pair.query.astype(jnp.float32).mT if known else None
            weights["inverse"] = _inverse(pair.key.astype(jnp.float32), inverse)[:, :columns]
    if query == "own":
        return weights
    stored = split(model.params["layers"][layer], config.query_width)["q"]
    name = "ahead"
    if config.rope is None:
        name, full = "partial", projection or in_full(stored, config.hidden_size, model.dtype)
        projection = _partial_projection(config, full, pair, columns)
    elif pair is not None:
        weights["query"] = pair.query[..., :columns]
    if projection is not None:
        small = small_dtype({"q": stored})
        weights[name] = projection if small is None else shrink_part(projection, small)
    return weights


def _inverse(
    basis: Float[Array, "k d r"], inverse: Float[Array, "k r d"] | None
) -> Float[Array, "k r d"]:
    """Return the inverse of each head's basis, with zero rows for negligible columns.

    They are of directions that queries or keys never used in the calibration text. The inverse
    would amplify their codes in a low-precision index, which are only rounding.

    Args:
        inverse: the inverse, if known; otherwise it is computed.
    """
    length = jnp.linalg.norm(basis, axis=1, keepdims=True)
    significant = length > 1e-4 * jnp.max(length, axis=2, keepdims=True)
    if inverse is None:
        # Normalised columns, so that short ones are not treated as singular.
        inverse = jnp.linalg.pinv(basis / jnp.where(length > 0, length, 1.0), rtol=1e-6)
        inverse = inverse / jnp.where(significant, length, 1.0).mT
    return jnp.where(significant.mT, inverse, 0.0)


def _partial_projection(config: ModelConfig, q: Params, basis: Any, columns: int) -> Params:
    """Return the query projection, scale included, restricted to r columns of the basis."""

    def restrict(x: Array) -> Array:
        heads = x.reshape(*x.shape[:-1], config.num_kv_heads, config.group_size, config.head_dim)
        heads = heads.astype(jnp.float32) * config.scale
        if basis is None:
            heads = heads[..., :columns]
        else:
            heads = jnp.einsum("...kgd,kdr->...kgr", heads, basis.query[..., :columns])
        return heads.reshape(*x.shape[:-1], -1).astype(x.dtype)

    return {name: restrict(x.T).T for name, x in q.items()}


def speculate_query(
    config: ModelConfig,
    layer: Layer,
    weights: Params,
    a: Float[Array, "b e"],
    positions: Int[Array, " b"],
    columns: int,
) -> Float[Array, "b k g r"]:
    """Return the partial query of a layer (section 4.3 of the paper).

    `weights` are its `speculation_weights`, and `a` approximates its attention input.
    """
    if "partial" in weights:
        q = project(a, weights["partial"])
        return q.reshape(a.shape[0], config.num_kv_heads, config.group_size, columns)
    if "ahead" in weights:
        q = layer.finish_query(project(a, weights["ahead"]), positions)
    else:
        q = layer.query(a, positions)
    q = config.grouped(q)
    if "query" not in weights:
        return q[..., :columns]
    return jnp.einsum("bkgd,kdr->bkgr", q.astype(jnp.float32), weights["query"])


def own_query(
    weights: Params, query: Float[Array, "b k g d"], columns: int
) -> Float[Array, "b k g r"]:
    """Return a layer's own query, scaled and rotated, in the index's coordinates; float32.

    With a "centre" in the weights, its scores lack the logit of the mean key (`mean_score`).
    """
    query = query.astype(jnp.float32)
    if "inverse" in weights:
        return jnp.einsum("bkgd,krd->bkgr", query, weights["inverse"])
    return query[..., :columns]


def mean_score(
    mean: Float[Array, "k d"] | None, query: Float[Array, "b k g d"]
) -> Float[Array, "b k g 1"]:
    """Return the mean key's logit, which centred scores lack; 0 without a mean."""
    if mean is None:
        return jnp.zeros((*query.shape[:3], 1), jnp.float32)
    mean = mean.astype(jnp.float32)
    return jnp.einsum("bkgd,kd->bkg", query.astype(jnp.float32), mean)[..., None]


def soft_cap(
    weights: Params, partial_query: Float[Array, "b k g r"], query: Float[Array, "b k g d"] | None
) -> Callable[[Float[Array, "b k g t"]], Float[Array, "b k g t"]] | None:
    """Return the function that bounds the index's scores; None for a model without a cap.

    It adds the mean key's logit for the true `query`, or if that is None for the speculated one.
    """
    if "softcap" not in weights:
        return None
    if query is None:
        mean = mean_score(weights.get("centre"), partial_query)
    else:
        mean = mean_score(weights.get("mean"), query)
    return lambda scores: soft_capped(scores + mean, weights["softcap"])


def partial_keys(
    weights: Params, keys: Float[Array, "b k n d"], columns: int
) -> Float[Array, "b k r n"]:
    """Return the index columns of cached keys, float32.

    A "centre" in the weights is subtracted, which changes all scores of a query alike.
    """
    keys = keys.astype(jnp.float32)
    if "key" in weights:
        partial = jnp.einsum("bknd,kdr->bkrn", keys, weights["key"])
    else:
        partial = keys[..., :columns].swapaxes(2, 3)
    return partial - weights["centre"][None, :, :, None] if "centre" in weights else partial
