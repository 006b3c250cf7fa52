"""MLP neurons in a corrected query: part of the MLP that a prediction skips. Not in the paper.

The approximation of the next layer's attention input lacks the layer's MLP. A linear map of it can
only restore the linear part. A corrected query is therefore a linear function of the approximation
a and of some neurons of that MLP, evaluated on a,

    q^ = a W^ + h(a) N + b^        h(a) = act(a G + g) * (a U + u)    or act(a U + u)

The neurons are those whose activations vary most, weighted by their effect on the query. The MLP
reads the hidden state under its own norm, the approximation is under an attention norm. Both are
affine maps of the same normalised state, so the conversion between them is folded into G and U.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from infinigen_jax.models.base import ModelConfig, Params, blueprint
from infinigen_jax.models.llama import ACTIVATIONS

UNIT = 8  # the number of neurons is a multiple of this
INNER = ("inner_kernel", "inner_bias")  # entries of a projection


def number_of(config: ModelConfig, share: float) -> int:
    """Return the number of neurons for a share of an MLP's width; 0 for none."""
    if share <= 0:
        return 0
    width = config.intermediate_size
    return min(max(UNIT, int(share * width) // UNIT * UNIT), width)


def projection_shapes(config: ModelConfig, layer: int, number: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's corrected projection with `number` neurons.

    The first layer has no neurons, since its rows are selected by its own input.
    """
    width = config.query_width
    shapes: dict[str, tuple[int, ...]] = {"kernel": (config.hidden_size, width), "bias": (width,)}
    if number and layer:
        inner = number * (2 if gated(config) else 1)
        shapes |= {"inner_kernel": (config.hidden_size, inner), "inner_bias": (inner,)}
        shapes["outer"] = number, width
    return shapes


def gated(config: ModelConfig) -> bool:
    """Whether the MLP of a family has gate and up projections, concatenated."""
    return "gate_up" in blueprint(config, jnp.float32).layer_shapes


def projected(
    config: ModelConfig, projection: Params, a: Float[Array, "*b e"]
) -> Float[Array, "*b c"]:
    """Return the projection of an approximate attention input, with its neurons if any.

    Args:
        projection: arrays as in `projection_shapes`, with c columns.
    """
    q = a @ projection["kernel"]
    if "bias" in projection:
        q = q + jnp.broadcast_to(projection["bias"], q.shape)
    if "outer" in projection:
        q = q + activations(config, projection, a) @ projection["outer"]
    return q


def activations(
    config: ModelConfig, projection: Params, a: Float[Array, "*b e"]
) -> Float[Array, "*b r"]:
    """Return h(a), see the module's docstring."""
    inner = a @ projection["inner_kernel"]
    inner = inner + jnp.broadcast_to(projection["inner_bias"], inner.shape)
    act = ACTIVATIONS[config.activation]
    if not gated(config):
        return act(inner)
    gate, up = jnp.split(inner, 2, axis=-1)
    return act(gate) * up


class Mlp:
    """MLP of a layer, evaluated on the approximation of a later layer's attention input.

    Args:
        params: parameters of the layer, float32.
    """

    def __init__(self, params: Params):
        self.inner = params["gate_up"] if "gate_up" in params else params["up"]
        self.down = params["down"]["kernel"]
        if "mlp_post_norm" in params:  # up to the factor of each token
            self.down = self.down * params["mlp_post_norm"]["scale"][None]
        self.norm = params["mlp_norm"]
        self.attention_norm = params["attention_norm"]

    def under(self, norm: Params) -> Params:
        """Return the first product of all neurons, for a state under another norm.

        Args:
            norm: parameters of that norm. Channels that it scales to zero are lost and set to zero.
        """
        scale, own_scale = norm["scale"], self.norm["scale"]
        nonzero = jnp.abs(scale) > 1e-6 * jnp.max(jnp.abs(scale))
        ratio = jnp.where(nonzero, own_scale / jnp.where(nonzero, scale, 1), 0.0)
        kernel = self.inner["kernel"]
        bias = self.inner.get("bias", jnp.zeros(kernel.shape[1], kernel.dtype))
        if "bias" in self.norm:
            shift = self.norm["bias"] - norm["bias"] * ratio
            bias = bias + jnp.matmul(shift, kernel, precision="highest")
        return {"inner_kernel": ratio[:, None] * kernel, "inner_bias": bias}

    def chosen(
        self,
        config: ModelConfig,
        whole: Params,
        stand_in: Float[Array, "w s e"],
        valid: Float[Array, "w s"],
        query: Float[Any, "e c"],
        number: int,
    ) -> Params:
        """Return the neurons with the largest effect on a query, out of all in `whole`.

        Args:
            config: architecture of the model.
            whole: result of `under`.
            stand_in: approximate attention inputs of the calibration windows.
            valid: 1 for valid tokens, 0 for padding.
            query: the later layer's query projection, including its norm's scale.
            number: number of neurons.
        """
        query = jnp.asarray(query, jnp.float32)
        best = _strongest(config, number, whole, stand_in, valid, self.down, query)
        return {name: picked(config, part, np.asarray(best)) for name, part in whole.items()}


def picked(config: ModelConfig, inner: Float[Array, "*e f"], neurons: Int[Any, " r"]) -> Array:
    """Return the columns of some neurons of a first product, gates and ups if it has both."""
    width = inner.shape[-1] // (2 if gated(config) else 1)
    columns = np.concatenate([neurons, width + neurons]) if gated(config) else neurons
    return inner[..., columns]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _strongest(
    config: ModelConfig,
    number: int,
    projection: Params,
    a: Float[Array, "w s e"],
    valid: Float[Array, "w s"],
    down: Float[Array, "f e"],
    query: Float[Array, "e c"],
) -> Int[Array, " r"]:
    """Return the neurons whose variance, weighted by their effect on the query, is largest."""

    def window(pair: tuple[Array, Array]) -> tuple[Array, Array]:
        h = activations(config, projection, pair[0])
        return pair[1] @ h, pair[1] @ jnp.square(h)

    with jax.default_matmul_precision("highest"):
        sums, squares = jax.lax.map(window, (a, valid))
        effect = jnp.sum(jnp.square(down @ query), axis=1)
    count = jnp.sum(valid)
    variance = jnp.sum(squares, axis=0) / count - jnp.square(jnp.sum(sums, axis=0) / count)
    return jnp.sort(jax.lax.top_k(variance * effect, number)[1])
