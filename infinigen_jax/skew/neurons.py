"""A few neurons of the MLP that a look-ahead skips: what a corrected query knows of it. Not in the
paper.

What stands in for the next layer's attention input lacks, whatever it is, the layer's MLP. A linear
map of it can make up for what is linear in that alone. So a corrected query is a linear function of
the stand-in and of some of that MLP's own neurons, evaluated on the stand-in,

    q^ = a W^ + h(a) N + b^        h(a) = act(a G + g) * (a U + u)    or act(a U + u)

those whose activations vary most, weighed by what they would add to the query. The MLP sees the
hidden state under its own norm, the stand-in is under an attention's; both are an affine map of the
same normalised state, so that the one follows from the other, folded into G and U.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from infinigen_jax.models.base import ModelConfig, Params, blueprint
from infinigen_jax.models.llama import ACTIVATIONS

UNIT = 8  # their number is a multiple of this
INNER = ("inner_kernel", "inner_bias")  # of a projection


def number_of(config: ModelConfig, share: float) -> int:
    """How many neurons a share of an MLP's width is; 0 for none."""
    if share <= 0:
        return 0
    width = config.intermediate_size
    return min(max(UNIT, int(share * width) // UNIT * UNIT), width)


def projection_shapes(config: ModelConfig, layer: int, number: int) -> dict[str, tuple[int, ...]]:
    """Of a layer's projection ahead, with so many neurons; the first layer's has none, as its rows
    are chosen by its own input."""
    width = config.query_width
    shapes: dict[str, tuple[int, ...]] = {"kernel": (config.hidden_size, width), "bias": (width,)}
    if number and layer:
        inner = number * (2 if gated(config) else 1)
        shapes |= {"inner_kernel": (config.hidden_size, inner), "inner_bias": (inner,)}
        shapes["outer"] = number, width
    return shapes


def gated(config: ModelConfig) -> bool:
    """Whether the MLP of a family is gate and up, side by side."""
    return "gate_up" in blueprint(config, jnp.float32).layer_shapes


def projected(
    config: ModelConfig, projection: Params, a: Float[Array, "*b e"]
) -> Float[Array, "*b c"]:
    """A projection of what stands in for an attention input, with its neurons if it has any.

    Args:
        projection: as in `projection_shapes`, c columns in place of all.
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
    """h(a) of the module's docstring."""
    inner = a @ projection["inner_kernel"]
    inner = inner + jnp.broadcast_to(projection["inner_bias"], inner.shape)
    act = ACTIVATIONS[config.activation]
    if not gated(config):
        return act(inner)
    gate, up = jnp.split(inner, 2, axis=-1)
    return act(gate) * up


class Mlp:
    """A layer's MLP on what stands in for a later layer's attention input.

    Args:
        params: of the layer, float32.
    """

    def __init__(self, params: Params):
        self.inner = params["gate_up"] if "gate_up" in params else params["up"]
        self.down = params["down"]["kernel"]
        self.norm = params["mlp_norm"]
        self.attention_norm = params["attention_norm"]

    def under(self, norm: Params) -> Params:
        """Its first product, of all neurons, for a state under another norm than its own.

        Args:
            norm: the parameters of that norm. A channel that it takes away is not there for the
                neurons either.
        """
        scale, own = (np.asarray(n["scale"], np.float64) for n in (norm, self.norm))
        there = np.abs(scale) > 1e-6 * np.abs(scale).max(initial=0)
        ratio = np.where(there, own / np.where(there, scale, 1), 0.0)
        kernel = np.asarray(self.inner["kernel"], np.float64)
        shift = np.zeros_like(scale)
        if "bias" in self.norm:
            shift = np.asarray(self.norm["bias"], np.float64)
            shift = shift - np.asarray(norm["bias"], np.float64) * ratio
        bias = shift @ kernel + np.asarray(self.inner.get("bias", 0.0), np.float64)
        made = {"inner_kernel": ratio[:, None] * kernel, "inner_bias": bias}
        return {name: jnp.asarray(part, jnp.float32) for name, part in made.items()}

    def chosen(
        self,
        config: ModelConfig,
        whole: Params,
        stand_in: Float[Array, "w s e"],
        there: Float[Array, "w s"],
        query: Float[Any, "e c"],
        number: int,
    ) -> Params:
        """The neurons that matter most to a query, of all in `whole`.

        Args:
            whole: of `under`.
            there: 1 for tokens that count, 0 for padding.
            query: the later layer's projection to queries, its norm's scale included.
        """
        spread = np.asarray(_variances(config, whole, stand_in, there), np.float64)
        effect = np.square(np.asarray(self.down, np.float64) @ np.asarray(query, np.float64))
        best = np.sort(np.argsort(-spread * effect.sum(axis=1), kind="stable")[:number])
        return {name: picked(config, part, best) for name, part in whole.items()}


def picked(config: ModelConfig, inner: Float[Array, "*e f"], neurons: Int[Any, " r"]) -> Array:
    """Some neurons of a first product, gates and ups if it has both."""
    width = inner.shape[-1] // (2 if gated(config) else 1)
    columns = np.concatenate([neurons, width + neurons]) if gated(config) else neurons
    return inner[..., columns]


@functools.partial(jax.jit, static_argnums=0)
def _variances(
    config: ModelConfig,
    projection: Params,
    a: Float[Array, "w s e"],
    there: Float[Array, "w s"],
) -> Float[Array, " f"]:
    """Of all neurons' activations; a window at a time, which are many."""

    def window(pair: tuple[Array, Array]) -> tuple[Array, Array]:
        h = activations(config, projection, pair[0])
        return pair[1] @ h, pair[1] @ jnp.square(h)

    with jax.default_matmul_precision("highest"):
        sums, squares = jax.lax.map(window, (a, there))
    count = jnp.sum(there)
    return jnp.sum(squares, axis=0) / count - jnp.square(jnp.sum(sums, axis=0) / count)
