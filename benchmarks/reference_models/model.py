"""Training pass of a model, built from the package's layers, so training and serving agree.

Parameters and the optimizer's state are float32. The pass computes in the blueprint's dtype:
bfloat16 on a GPU, float32 on a CPU.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from infinigen_jax.models import Blueprint, ModelConfig, Params, blueprint, random_params

Attention = Callable[[Array, Array, Array], Array]
RESIDUAL = ("o", "down")  # modules that write to the residual stream


class Training(NamedTuple):
    """Settings of the loss: dtype of the pass, and whether layers are recomputed (`remat`)."""

    blueprint: Blueprint
    attention: Attention
    remat: bool
    dtype: Any = jnp.float32


class State(NamedTuple):
    """State of the training, replaced by every step."""

    params: Params
    optimizer: Any


class Losses(NamedTuple):
    """Nats per token of books and of answers, 0 without any, and the norm of the gradient."""

    books: Float[Array, ""]
    answers: Float[Array, ""]
    gradient: Float[Array, ""]


def attention(dtype: Any) -> Attention:
    """Return causal attention of scaled queries: cuDNN's on a GPU in half precision, else XLA's."""
    cudnn = jax.default_backend() == "gpu" and jnp.dtype(dtype).itemsize == 2
    return functools.partial(
        jax.nn.dot_product_attention,
        scale=1.0,
        is_causal=True,
        implementation="cudnn" if cudnn else "xla",
    )


def initial_params(config: ModelConfig, seed: int) -> Params:
    """Draw normal parameters, smaller for modules that write to the residual stream."""
    params = random_params(config, jnp.float32, seed)
    factor = jnp.float32((2 * config.num_layers) ** -0.5)
    for layer in params["layers"]:
        for name in RESIDUAL:
            layer[name]["kernel"] = layer[name]["kernel"] * factor
    return params


def logits(training: Training, params: Params, tokens: Int[Array, "b s"]) -> Float[Array, "b s v"]:
    """Return the logits of every position, float32, from float32 `params`."""
    plan, attend, remat, dtype = training
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)

    def run(params: Params, x: Array) -> Array:
        layer = plan.layer(params)
        a = layer.attention_input(x)
        keys, values = layer.key_value(a, positions)
        x = x + layer.attention_output(attend(layer.query(a, positions), keys, values))
        return x + layer.mlp(x)

    # Look up in float32: the gradient of a lookup sums thousands of small changes of one token,
    # for which bfloat16 has too few digits.
    lookup = blueprint(plan.config, jnp.float32).embedding(params["embedding"])
    x = lookup.embed(tokens, positions).astype(dtype)
    for layer_params in params["layers"]:
        x = (jax.checkpoint(run) if remat else run)(_cast(layer_params, dtype), x)
    return plan.embedding(_cast(params["embedding"], dtype)).logits(x)


def token_losses(
    training: Training, params: Params, tokens: Int[Array, "b n"]
) -> Float[Array, "b n-1"]:
    """Return the nats of every token except the first."""
    return optax.softmax_cross_entropy_with_integer_labels(
        logits(training, params, tokens[:, :-1]), tokens[:, 1:]
    )


def _cast(params: Params, dtype: Any) -> Params:
    return jax.tree.map(lambda p: p.astype(dtype), params)


def optimizer(weight_decay: float) -> optax.GradientTransformation:
    """Return AdamW after gradient clipping, without the learning rate, which steps receive."""
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.95, eps=1e-8),
        optax.add_decayed_weights(weight_decay, mask=lambda p: jax.tree.map(_decays, p)),
    )


def _decays(parameter: Array) -> bool:
    return parameter.ndim > 1


def train_step(training: Training, weight_decay: float) -> Callable[..., tuple[State, Losses]]:
    """Return the jitted step, which donates the state."""

    def loss(
        params: Params,
        tokens: Int[Array, "b n"],
        weights: Float[Array, "b s"],
        answers: Bool[Array, "b s"],
    ) -> tuple[Array, tuple[Array, Array]]:
        nats = token_losses(training, params, tokens)
        books = jnp.where(answers, 0.0, weights)
        asked = answers.astype(jnp.float32)
        mean = jnp.sum(nats * weights) / jnp.maximum(jnp.sum(weights), 1.0)
        parts = [jnp.sum(nats * w) / jnp.maximum(jnp.sum(w), 1.0) for w in (books, asked)]
        return mean, (parts[0], parts[1])

    @functools.partial(jax.jit, donate_argnums=0)
    def step(
        state: State,
        tokens: Int[Array, "b n"],
        weights: Float[Array, "b s"],
        answers: Bool[Array, "b s"],
        rate: Float[Array, ""],
    ) -> tuple[State, Losses]:
        gradient, parts = jax.grad(loss, has_aux=True)(state.params, tokens, weights, answers)
        norm = optax.tree.norm(gradient)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes Python floats and counters
            change, moments = optimizer(weight_decay).update(
                gradient, state.optimizer, state.params
            )
        params = jax.tree.map(lambda p, c: p - rate * c, state.params, change)
        return State(params, moments), Losses(parts[0], parts[1], norm)

    return step
