"""Guessing, in layer l, what layer l+1 will attend to (InfiniGen, section 4.2).

    a         layer l's normalised input, the stand-in for layer l+1's
    q^        layer l+1's query of it, in layer l+1's skewed basis, the first r columns
    k^        the index: layer l+1's cached keys in the same basis, the first r columns
    q^ . k^   the speculated attention logits (`index.IndexFormat.scores`)

Not in the paper: a better stand-in is the hidden state after layer l's attention to the resident
rows alone, sinks and recent tokens, under layer l+1's norm: it waits for no rows, so that those of
layer l+1 have the time of the layer but for its projections. The basis orders its columns by
energy, so "the columns that matter" are always the leading ones. Besides the paper's there is a
balanced basis, and a query corrected on calibration text (`skew`, `correction`), which may see some
neurons of layer l's MLP as well (`neurons`); a converted model has what its conversion gave it.
"""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from infinigen_jax.errors import InputError
from infinigen_jax.models.base import Layer, ModelConfig, Params
from infinigen_jax.models.joined import split
from infinigen_jax.skew.neurons import INNER, projected

if TYPE_CHECKING:
    from infinigen_jax.loading.load import Model

BASES = ("auto", "svd", "balanced")
QUERIES = ("auto", "plain", "corrected", "own")
# What a query ahead is guessed from: the attention's input, or the hidden state after attention to
# the resident rows alone.
SOURCES = ("input", "resident")


def partial_columns(head_dim: int, ratio: float) -> int:
    """r = floor(d * ratio), at least 1 (exact at ratios such as 0.3, where d * ratio rounds)."""
    return max(1, int(head_dim * ratio + 1e-9))


def choose_basis(model: "Model", basis: str) -> str:
    """The basis to use, "svd" or "balanced": "auto" is the balanced one, where the model has it.

    "none" for a model that was converted without one.

    Raises:
        InputError: naming the conversion that the basis asked for takes.
    """
    if basis == "auto":
        return model.skew
    if basis == model.skew or (basis == "svd" and model.svd_bases is not None):
        return basis
    raise InputError(
        f"--basis {basis}: the model was converted with --skew {model.skew}; convert it again "
        f"with --skew {basis}"
    )


def choose_query(model: "Model", query: str) -> str:
    """Which of QUERIES to use: "auto" is the corrected one, where the model has it.

    Raises:
        InputError: naming the conversion that the corrected query takes.
    """
    if query == "auto":
        return "plain" if model.ahead is None else "corrected"
    if query == "corrected" and model.ahead is None:
        raise InputError(
            "--query corrected: the model has no calibration for it; convert it again with "
            "--skew balanced"
        )
    return query


def choose_source(model: "Model", query: str, source: str) -> str:
    """Which of SOURCES a query ahead is guessed from: "auto" is what the model was converted for.

    Raises:
        InputError: naming the conversion that a corrected query takes.
    """
    if query != "corrected":
        return model.speculate_from if source == "auto" else source
    if source not in ("auto", model.speculate_from):
        raise InputError(
            f"--speculate-from {source}: the model's corrected query is for "
            f"{model.speculate_from}; convert it again with --speculate-from {source}, or use "
            "--query plain"
        )
    return model.speculate_from


def speculation_weights(
    model: "Model",
    layer: int,
    columns: int,
    centred: bool = False,
    basis: str = "auto",
    query: str = "plain",
    true: bool = False,
) -> Params:
    """What is needed, beside the model's own weights, to speculate a layer.

    Without rotary positions nothing stands between the projection and the dot product, so the
    basis folds into a query projection of r columns: {"kernel" [e, h*r], "bias" [h*r]}, and
    {"key" [k, d, r]} if the cached keys are not in the basis already. With rotary positions the
    basis comes after the rotation: {"query" [k, d, r], "key" [k, d, r]}; nothing at all where the
    keys' own leading columns are used. The corrected query's projection then takes the place of
    the layer's own: {"ahead": {"kernel" [e, h*d], "bias" [h*d]}}, and in either form what it has of
    `neurons`.

    Args:
        centred: also give the mean calibration key, where it is known: "centre" [k, r] in the
            index's coordinates, "mean" [k, d] in those of the cached keys.
        basis: one of BASES.
        query: one of QUERIES. The layer's own needs nothing but the index's weights.
        true: also give what takes the layer's own query to the index's coordinates, if there is a
            change of basis: "own" [k, r, d], the leading rows of its inverse. Where the index has
            all columns, scores are then the true ones; else those of what the columns that it has
            tell of a key, as the columns of a balanced basis are uncorrelated with each other.

    Raises:
        InputError: for a basis or a query that the model was not converted for.
    """
    config = model.config
    basis, query = choose_basis(model, basis), choose_query(model, query)
    corrected = None
    projection = split(model.params["layers"][layer], config.query_width)["q"]
    if query == "corrected":
        assert model.ahead is not None
        corrected = model.ahead[layer]
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
            weights["own"] = _inverse(pair.key.astype(jnp.float32))[:, :columns]
    if query == "own":
        return weights
    if config.rope is None:
        return weights | _partial_projection(config, projection, pair, columns)
    if corrected is not None:
        weights["ahead"] = projection
    return weights | ({} if pair is None else {"query": pair.query[..., :columns]})


def _inverse(basis: Float[Array, "k d r"]) -> Float[Array, "k r d"]:
    """The inverse of each head's basis, with a row of zeros for a column that is next to nothing.

    In a balanced basis such a column is one of a direction that queries, or keys, never took in
    the calibration text: an index in few bits has but rounding there, which the inverse would
    make large. A head that asks for nothing has no other columns.
    """
    length = jnp.linalg.norm(basis, axis=1, keepdims=True)
    there = length > 1e-4 * jnp.max(length, axis=2, keepdims=True)
    # Of unit columns, so that what is short does not count as singular, and only nothing does.
    inverse = jnp.linalg.pinv(basis / jnp.where(length > 0, length, 1.0), rtol=1e-6)
    return jnp.where(there, inverse.mT / jnp.where(there, length, 1.0), 0.0).mT


def projected_query(
    config: ModelConfig,
    layer: Layer,
    projection: Params,
    a: Float[Array, "*b e"],
    positions: Int[Array, "*b"],
    lengths: Int[Array, "*b"] | None = None,
) -> Float[Array, "*b h d"]:
    """As `Layer.query`, with another projection of another input, see `neurons.projected`."""
    return layer.finish_query(projected(config, projection, a), positions, lengths)


def _partial_projection(config: ModelConfig, q: Params, basis: Any, columns: int) -> Params:
    """The query projection, scale included, restricted to r columns of the basis."""

    def restrict(x: Array) -> Array:
        heads = x.reshape(*x.shape[:-1], config.num_kv_heads, config.group_size, config.head_dim)
        heads = heads.astype(jnp.float32) * config.scale
        if basis is None:
            heads = heads[..., :columns]
        else:
            heads = jnp.einsum("...kgd,kdr->...kgr", heads, basis.query[..., :columns])
        return heads.reshape(*x.shape[:-1], -1).astype(x.dtype)

    return {name: x if name in INNER else restrict(x) for name, x in q.items()}


def speculate_query(
    config: ModelConfig,
    layer: Layer,
    weights: Params,
    a: Float[Array, "b e"],
    positions: Int[Array, " b"],
    columns: int,
) -> Float[Array, "b k g r"]:
    """The partial query of a layer.

    Args:
        layer: its module.
        weights: its `speculation_weights`.
        a: what stands in for its attention input.
        positions: of the current tokens.
    """
    if "kernel" in weights:
        q = projected(config, weights, a)
        return q.reshape(a.shape[0], config.num_kv_heads, config.group_size, columns)
    if "ahead" in weights:
        q = projected_query(config, layer, weights["ahead"], a, positions)
    else:
        q = layer.query(a, positions)
    q = config.grouped(q)
    if "query" not in weights:
        return q[..., :columns]
    return jnp.einsum("bkgd,kdr->bkgr", q.astype(jnp.float32), weights["query"])


def own_query(
    weights: Params, query: Float[Array, "b k g d"], columns: int
) -> Float[Array, "b k g r"]:
    """A layer's own query, scaled and rotated, in the index's coordinates; float32.

    Its product with an entry is the attention logit, or what the index's columns tell of it if it
    has not all of them; less that of the mean key if there is a "centre" among the weights.
    """
    query = query.astype(jnp.float32)
    if "own" in weights:
        return jnp.einsum("bkgd,krd->bkgr", query, weights["own"])
    return query[..., :columns]


def mean_score(
    mean: Float[Array, "k d"] | None, query: Float[Array, "b k g d"]
) -> Float[Array, "b k g 1"]:
    """The mean key's logit by a true query, which centred scores lack; 0 if there is none."""
    if mean is None:
        return jnp.zeros((*query.shape[:3], 1), jnp.float32)
    mean = mean.astype(jnp.float32)
    return jnp.einsum("bkgd,kd->bkg", query.astype(jnp.float32), mean)[..., None]


def partial_keys(
    weights: Params, keys: Float[Array, "b k n d"], columns: int
) -> Float[Array, "b k r n"]:
    """What the index keeps of cached keys, in float32.

    With a "centre" among the weights, less that: a constant in all keys adds the same to all
    scores of a query, which changes neither their order nor their distances.
    """
    keys = keys.astype(jnp.float32)
    if "key" in weights:
        partial = jnp.einsum("bknd,kdr->bkrn", keys, weights["key"])
    else:
        partial = keys[..., :columns].swapaxes(2, 3)
    return partial - weights["centre"][None, :, :, None] if "centre" in weights else partial
