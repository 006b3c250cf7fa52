"""LLaMA 1, 2 and 3: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Related families reuse these modules; their files describe only the differences.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from infinigen_jax.models.base import ACTIVATIONS, HEAD_NORMS, POST_NORMS, ModelConfig
from infinigen_jax.models.linear import Linear, TokenTable
from infinigen_jax.models.rope import PerToken, Rotation, as_last, rotate
from infinigen_jax.ops.attention import MASKED, soft_capped

SETTINGS = {"windows": "refused"}


class Norm(nnx.Module):
    """RMSNorm or LayerNorm over the last axis, computed in float32; result in x's dtype.

    x / sqrt(mean(x^2) + epsilon) * scale. LayerNorm subtracts the mean first, and may add a bias.
    Flax's norms have two drawbacks here: their default variance E[x^2] - mean^2 cancels on OPT's
    outliers, and in half precision they rely on implicit promotion, which the tests forbid.
    """

    def __init__(self, name: str, shape: tuple[int, ...], config: ModelConfig, dtype: Any):
        self.scale = nnx.Param(jnp.ones(shape, jnp.float32 if config.minus_one(name) else dtype))
        self.centred, self.epsilon = config.layer_norms, config.norm_eps
        if name in POST_NORMS and config.post_norm_eps is not None:
            self.epsilon = config.post_norm_eps
        has_bias = config.layer_norms and config.norm_biases
        self.bias = nnx.Param(jnp.zeros(shape, dtype)) if has_bias else None

    def __call__(self, x: Float[Array, "*b e"]) -> Float[Array, "*b e"]:
        y = x.astype(jnp.float32)
        if self.centred:
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = of_unit_mean_square(y, self.epsilon)
        y = y * as_last(self.scale[...].astype(jnp.float32), y.ndim - 1)
        if self.bias is not None:
            y = y + as_last(self.bias[...].astype(jnp.float32), y.ndim - 1)
        return y.astype(x.dtype)


class Factor(nnx.Module):
    """Factor on a layer's output, a parameter."""

    def __init__(self, dtype: Any):
        self.factor = nnx.Param(jnp.ones(1, dtype))

    def __call__(self, x: Float[Array, "*b e"]) -> Float[Array, "*b e"]:
        return x * as_last(self.factor[...].astype(x.dtype), x.ndim - 1)


class Layer(nnx.Module):
    """One decoder layer, split where the KV cache is read and where speculation starts.

    x = x + attention_output(attention(query(a), key_value(a)), a)    a = attention_input(x)
    x = after_mlp(x, a)

    `lengths` are the tokens of each sequence in this call of the model, by default up to and
    including `positions`. Some rotary embeddings depend on them (`rope.rotate`). Norms are those of
    `ModelConfig.norms`.
    """

    attention_norm: Norm | None = None
    attention_post_norm: Norm | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    mlp_norm: Norm | None = None
    mlp_post_norm: Norm | None = None

    def __init__(self, config: ModelConfig, dtype: Any):
        c = config
        query_width, key_width = c.query_width, c.num_kv_heads * c.head_dim
        kv_width = key_width if c.values_from_keys else 2 * key_width
        self.q = Linear(c.hidden_size, query_width, c.attention_bias, dtype)
        self.kv = Linear(c.hidden_size, kv_width, c.attention_bias, dtype)
        self.o = Linear(query_width, c.hidden_size, c.attention_bias and c.output_bias, dtype)
        if c.attention_gates:
            self.gate = Linear(c.hidden_size, query_width, False, dtype)
        if c.gated:
            self.gate_up = Linear(c.hidden_size, 2 * c.intermediate_size, c.mlp_bias, dtype)
        else:
            self.up = Linear(c.hidden_size, c.intermediate_size, c.mlp_bias, dtype)
        self.down = Linear(c.intermediate_size, c.hidden_size, c.mlp_bias, dtype)
        heads = dict(zip(HEAD_NORMS, (c.num_heads, c.num_kv_heads), strict=True))
        for name in c.norms:
            shape: tuple[int, ...] = (c.hidden_size,)
            if name in heads:
                size = c.head_dim
                kinds = {"each": (size,), "own": (heads[name], size), "all": (heads[name] * size,)}
                shape = kinds[c.head_norms]
            setattr(self, name, Norm(name, shape, c, dtype))
        if c.layer_ropes:
            self.rotation = Rotation(c.head_dim, any(r and r.interleaved for r in c.layer_ropes))
        if c.layer_factors:
            self.output = Factor(dtype)
        self.config = config

    def attention_input(self, x: Float[Array, "*b e"]) -> Float[Array, "*b e"]:
        """Return the hidden state after the pre-attention norm."""
        return _normed(self.attention_norm, x)

    def query(
        self, a: Float[Array, "*b e"], positions: PerToken, lengths: PerToken | None = None
    ) -> Float[Array, "*b h d"]:
        """Return queries as they enter the dot product: `finish_query` of the projection."""
        return self.finish_query(self.q(a), positions, lengths)

    def finish_query(
        self, projected: Float[Array, "*b w"], positions: PerToken, lengths: PerToken | None = None
    ) -> Float[Array, "*b h d"]:
        """Apply norm, rotation and scale to projected queries, w = h*d, bias included."""
        c = self.config
        q = projected.reshape(*projected.shape[:-1], c.num_heads, c.head_dim)
        q = self.placed(q, self.q_norm, positions, lengths)
        q = _scaled(q, c.scale)
        if not c.query_growth:
            return q
        assert c.rope is not None
        contexts = (positions // c.rope.original_positions).astype(jnp.float32)
        growth = 1 + c.query_growth * jnp.log1p(contexts)
        return q * growth[..., None, None].astype(q.dtype)

    def key_value(
        self, a: Float[Array, "*b e"], positions: PerToken, lengths: PerToken | None = None
    ) -> tuple[Float[Array, "*b k d"], Float[Array, "*b k d"]]:
        """Return keys, after norm and rotation, and values."""
        c = self.config
        kv = self.kv(a).reshape(*a.shape[:-1], -1, c.head_dim)
        key, value = (kv, kv) if c.values_from_keys else jnp.split(kv, 2, axis=-2)
        if c.value_norms:
            value = of_unit_mean_square(value, c.norm_eps)
        return self.placed(key, self.k_norm, positions, lengths), value

    def placed(
        self,
        x: Float[Array, "*b heads d"],
        norm: Norm | None,
        positions: PerToken,
        lengths: PerToken | None,
    ) -> Float[Array, "*b heads d"]:
        """Apply norm, to each head or to all together, and rotation, in the family's order."""
        c = self.config

        def normed(x: Array) -> Array:
            if c.head_norms == "bare":
                return of_unit_mean_square(x, c.norm_eps)
            shape = (*x.shape[:-2], -1) if c.head_norms == "all" else x.shape
            return _normed(norm, x.reshape(shape)).reshape(x.shape)

        def rotated(x: Array) -> Array:
            if c.layer_ropes:
                return self.rotation(x, positions)
            return x if c.rope is None else rotate(x, positions, c.rope, lengths)

        return normed(rotated(x)) if c.norm_after_rotation else rotated(normed(x))

    def attention_output(
        self, o: Float[Array, "*b h d"], a: Float[Array, "*b e"]
    ) -> Float[Array, "*b e"]:
        """Return attention's addition to the residual stream, from the heads' outputs and `a`."""
        if self.config.attention_gates:
            o = o * jax.nn.sigmoid(self.gate(a)).reshape(o.shape)
        y = self.o(o.reshape(*o.shape[:-2], -1))
        return _scaled(_normed(self.attention_post_norm, y), self.config.residual_scale)

    def mlp(self, x: Float[Array, "*b e"], a: Float[Array, "*b e"]) -> Float[Array, "*b e"]:
        """Return the MLP's addition to the residual stream; its norms are included.

        x is the stream after attention. With `parallel_mlp`, the MLP reads `a`, attention's input.
        """
        y = self.feed_forward(a if self.config.parallel_mlp else _normed(self.mlp_norm, x))
        return _scaled(_normed(self.mlp_post_norm, y), self.config.residual_scale)

    def after_mlp(self, x: Float[Array, "*b e"], a: Float[Array, "*b e"]) -> Float[Array, "*b e"]:
        """Return the layer's output, from the stream after attention; see `mlp`."""
        x = x + self.mlp(x, a)
        return self.output(x) if self.config.layer_factors else x

    def feed_forward(self, x: Float[Array, "*b e"]) -> Float[Array, "*b e"]:
        """Return the MLP of normalised hidden states."""
        activation = ACTIVATIONS[self.config.activation]
        if not self.config.gated:
            return self.down(activation(self.up(x)))
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(activation(gate) * up)


def _normed(norm: Norm | None, x: Float[Array, "*b e"]) -> Float[Array, "*b e"]:
    return x if norm is None else norm(x)


def of_unit_mean_square(x: Float[Array, "*b e"], epsilon: float) -> Float[Array, "*b e"]:
    """Return RMSNorm without a scale, computed in float32."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + epsilon)).astype(x.dtype)


def _scaled(x: Float[Array, "*b e"], factor: float) -> Float[Array, "*b e"]:
    """Multiply in float32: in bfloat16, the factor itself would be wrong by up to 0.4 %."""
    return x if factor == 1 else (x.astype(jnp.float32) * factor).astype(x.dtype)


class Embedding(nnx.Module):
    """Embedding of tokens to hidden states, and of hidden states to logits."""

    def __init__(self, config: ModelConfig, dtype: Any):
        c = config
        self.tokens = TokenTable(c.vocab_size, c.hidden_size, dtype)
        self.norm = Norm("norm", (c.hidden_size,), c, dtype)
        if not c.tie_embeddings:
            self.head = Linear(c.hidden_size, c.num_logits or c.vocab_size, False, dtype)
        self.config = config

    def embed(self, tokens: PerToken, positions: PerToken) -> Float[Array, "*b e"]:
        x = self.tokens(tokens)
        return x * jnp.asarray(self.config.embedding_scale, x.dtype)  # rounded, as in Gemma

    def logits(self, x: Float[Array, "*b e"]) -> Float[Array, "*b v"]:
        """Apply the final norm and the output projection; return float32 logits, bounded."""
        c, x = self.config, self.norm(x)
        head = self.tokens.attend if c.tie_embeddings else self.head
        y = soft_capped(head(x, jnp.float32) / c.logit_divisor, c.logit_softcap)
        if c.num_logits is None:
            return y
        absent = [(0, 0)] * (y.ndim - 1) + [(0, c.vocab_size - c.num_logits)]
        return jnp.pad(y, absent, constant_values=MASKED)
