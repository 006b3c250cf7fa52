"""Causal attention with a gradient, for training.

On a GPU cuDNN's. On a CPU time goes where scores go through memory, so here one KV head of one
sequence is worked on at a time, a block of queries over the keys up to their end: what a block
needs stays in the processor's cache. Nothing of it is kept for the gradient but the logarithm of
each softmax's sum (Dao et al., 2022).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from benchmarks.files import note

Attention = Callable[[Array, Array, Array], Array]
BLOCK = 256  # queries at a time
MASKED = -1e30


def best_attention(dtype: Any) -> Attention:
    """What is fastest on this machine; queries come scaled."""
    if jax.default_backend() != "gpu":
        return blocked_attention
    cudnn = functools.partial(
        jax.nn.dot_product_attention, scale=1.0, is_causal=True, implementation="cudnn"
    )
    if jnp.dtype(dtype).itemsize == 2 and _runs(cudnn, dtype):
        return cudnn
    return functools.partial(blocked_attention, together=True)


def _runs(attend: Attention, dtype: Any) -> bool:
    """Whether an implementation exists here, gradient included."""
    q, k = jnp.ones((1, 128, 2, 64), dtype), jnp.ones((1, 128, 1, 64), dtype)
    try:
        gradient = jax.grad(lambda q, k, v: jnp.sum(attend(q, k, v).astype(jnp.float32)), (0, 1, 2))
        jax.block_until_ready(jax.jit(gradient)(q, k, k))
    except Exception as error:  # many kinds, by what is missing
        note(f"no attention by cuDNN: {' '.join(str(error).split())[:200]}")
        return False
    return True


def blocked_attention(
    q: Float[Array, "b s h d"],
    keys: Float[Array, "b s k d"],
    values: Float[Array, "b s k d"],
    together: bool = False,
) -> Float[Array, "b s h d"]:
    """Causal attention; query head h reads KV head h // (h / k).

    Args:
        together: all heads of all sequences at a time; else one by one, within a cache.
    """
    b, s, h, d = q.shape
    k = keys.shape[2]
    grouped = q.reshape(b, s, k, h // k, d).swapaxes(1, 2).reshape(b * k, s, h // k, d)

    def rows(x: Float[Array, "b s k d"]) -> Float[Array, "n s d"]:
        return x.swapaxes(1, 2).reshape(b * k, s, d)

    heads = (grouped, rows(keys), rows(values))
    output = jax.vmap(_head)(*heads) if together else jax.lax.map(lambda x: _head(*x), heads)
    return output.reshape(b, k, s, h // k, d).swapaxes(1, 2).reshape(b, s, h, d)


@jax.custom_vjp
def _head(
    q: Float[Array, "s g d"], keys: Float[Array, "s d"], values: Float[Array, "s d"]
) -> Float[Array, "s g d"]:
    """Attention of one KV head's group of query heads."""
    return _head_and_sums(q, keys, values)[0]


def _head_and_sums(q: Array, keys: Array, values: Array) -> tuple[Array, Float[Array, "s g"]]:
    outputs, sums = [], []
    for start, stop in _blocks(q.shape[0]):
        scores = _scores(q, keys, start, stop)
        peak = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - peak)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        summed = jnp.matmul(weights.astype(values.dtype), values[:stop])
        output = summed / total.astype(summed.dtype)
        outputs.append(output.reshape(stop - start, *q.shape[1:]))
        sums.append((peak + jnp.log(total)).reshape(stop - start, q.shape[1]))
    return jnp.concatenate(outputs), jnp.concatenate(sums)


def _forward(q: Array, keys: Array, values: Array) -> tuple[Array, tuple[Array, ...]]:
    output, sums = _head_and_sums(q, keys, values)
    return output, (q, keys, values, output, sums)


def _backward(kept: tuple[Array, ...], change: Array) -> tuple[Array, Array, Array]:
    """Weights p: dp = do v', ds = p (dp - sum(p dp)); dq = ds k, dk = ds' q, dv = p' do."""
    q, keys, values, output, sums = kept
    d = q.shape[-1]
    # sum(p dp) of a row is do . o: dp need not be summed over the keys.
    common = jnp.sum((change * output).astype(jnp.float32), axis=-1)
    of_q = []
    of_keys, of_values = jnp.zeros(keys.shape, jnp.float32), jnp.zeros(values.shape, jnp.float32)
    for start, stop in _blocks(q.shape[0]):
        block_q, block_change = q[start:stop].reshape(-1, d), change[start:stop].reshape(-1, d)
        weights = jnp.exp(_scores(q, keys, start, stop) - sums[start:stop].reshape(-1, 1))
        of_weights = _dot("qd,nd->qn", block_change, values[:stop])
        of_scores = weights * (of_weights - common[start:stop].reshape(-1, 1))
        weights, of_scores = weights.astype(q.dtype), of_scores.astype(q.dtype)
        of_q.append(_dot("qn,nd->qd", of_scores, keys[:stop]).reshape(-1, *q.shape[1:]))
        of_keys = of_keys.at[:stop].add(_dot("qn,qd->nd", of_scores, block_q))
        of_values = of_values.at[:stop].add(_dot("qn,qd->nd", weights, block_change))
    gradient = jnp.concatenate(of_q), of_keys, of_values
    return gradient[0].astype(q.dtype), gradient[1].astype(q.dtype), gradient[2].astype(q.dtype)


_head.defvjp(_forward, _backward)


def _blocks(length: int) -> list[tuple[int, int]]:
    return [(start, min(start + BLOCK, length)) for start in range(0, length, BLOCK)]


def _scores(q: Array, keys: Array, start: int, stop: int) -> Float[Array, "q n"]:
    """Masked scores of queries [start, stop), all heads of the group, over the keys before stop."""
    scores = _dot("qd,nd->qn", q[start:stop].reshape(-1, q.shape[-1]), keys[:stop])
    row = jnp.repeat(jnp.arange(start, stop), q.shape[1])
    return jnp.where(jnp.arange(stop)[None] <= row[:, None], scores, MASKED)


def _dot(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
