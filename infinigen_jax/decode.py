"""One decode step: the layer that both schedules share, and the schedules.

    decode_layer:   norm -> speculate layer l+1 -> start its transfer
                         -> attend (sinks, window, fetched rows) -> MLP -> await the transfer

`fused` unrolls all layers into one compiled step, `layerwise` dispatches one compiled call a layer
(one compilation serves all layers of a kind). They trace the same function and give equal results.
Unrolled, not scanned: a scan over stacked weights copies every weight once a token (docs/gpu.md).

The host cache and the policy's state are read-only inside a step; new rows go to the ring of
resident rows, and from there to the host in `flush`, one donated update every `window` steps.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, UInt

from infinigen_jax.attention import (
    attend,
    extend_softmax,
    finish_softmax,
    packed,
    start_softmax,
)
from infinigen_jax.cache import Cache, DenseLayer, Resident, Slots
from infinigen_jax.memory import Placement, append_rows, read_block
from infinigen_jax.models import Blueprint, ModelConfig, Params, blueprint
from infinigen_jax.policies import Policy
from infinigen_jax.sampling import Sampling, row_keys, sample
from infinigen_jax.selection import Request
from infinigen_jax.transfer import Transfer

SCHEDULES = ("fused", "layerwise")
STREAM_BLOCK = 1024  # tokens of a streamed block


class Following(NamedTuple):
    """What layer l needs of layer l+1 to speculate for it."""

    params: Params
    weights: Params
    state: Any
    number: Int[Array, ""]


class Fetched(NamedTuple):
    """Rows that were requested for a layer, on the device or (a ticket) on their way."""

    request: Request
    rows: Any


class Carry(NamedTuple):
    """What goes from layer to layer; `count` is the rows fetched so far, all heads together."""

    x: Float[Array, "b e"]
    fetched: Fetched | None
    count: Int[Array, " b"]


class Weights(NamedTuple):
    """Everything constant: the model's parameters and the policy's, one per host layer."""

    params: Params
    policy: tuple[Params, ...]


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The pure functions of a step, for one model architecture and one set of choices.

    Attributes:
        dense_layers: leading layers whose cache stays on the device.
        mesh: axes "data" (sequences) and "model" (KV heads).
    """

    config: ModelConfig
    dtype: jnp.dtype
    policy: Policy
    transfer: Transfer
    dense_layers: int
    mesh: Mesh

    @property
    def blueprint(self) -> Blueprint:
        return blueprint(self.config, self.dtype)

    @property
    def slots(self) -> Slots:
        return Slots(self.policy.sinks, self.policy.window)

    @property
    def host_layers(self) -> int:
        """How many layers have their cache on the host."""
        return self.config.num_layers - self.dense_layers

    def decode_layer(
        self,
        params: Params,
        carry: Carry,
        local: DenseLayer | Resident,
        host: Float[Array, "l b k t w"] | None,
        number: Int[Array, ""] | None,
        following: Following | None,
        positions: Int[Array, " b"],
    ) -> tuple[Carry, DenseLayer | Resident]:
        """One layer of a step.

        Args:
            params: of this layer.
            carry: from the layer before; its `fetched` is this layer's.
            local: this layer's rows on the device.
            host: the host cache, read-only.
            number: of this layer among those on the host; None for a dense layer.
            following: the next layer, if rows are to be fetched for it.
            positions: of the current tokens.
        """
        config = self.config
        layer = self.blueprint.layer(params)
        x = carry.x
        a = layer.attention_input(x)
        fetched = None
        if following is not None:
            assert host is not None
            next_layer = self.blueprint.layer(following.params)
            fetched = self.request(next_layer, following, a, host, positions)
        with jax.named_scope("attention"):
            q = layer.query(a, positions)
            q = q.reshape(q.shape[0], config.num_kv_heads, config.group_size, config.head_dim)
            key, value = layer.key_value(a, positions)
            if isinstance(local, DenseLayer):
                local = local.write(key, value, positions)
                o = attend(q, local.part(positions))
            else:
                local = local.write(jnp.concatenate([key, value], axis=-1), positions, self.slots)
                o = self.attend_host_layer(q, carry.fetched, local, host, number, positions)
            x = x + layer.attention_output(o.reshape(o.shape[0], config.num_heads, -1))
        with jax.named_scope("mlp"):
            x = x + layer.mlp(x)
        count = carry.count
        if fetched is not None:
            with jax.named_scope("wait"):
                x, rows = self.transfer.wait(fetched.rows, x)
            count = count + jnp.sum(fetched.request.count, axis=-1)
            fetched = Fetched(fetched.request, rows)
        elif self.policy.streams and host is not None and isinstance(local, Resident):
            streamed = jnp.sum(self.slots.eligible(positions, host.shape[3]), axis=-1)
            count = count + streamed.astype(jnp.int32) * config.num_kv_heads
        return Carry(x, fetched, count), local

    def request(
        self,
        layer: Any,
        following: Following,
        a: Float[Array, "b e"],
        host: Float[Array, "l b k t w"],
        positions: Int[Array, " b"],
    ) -> Fetched:
        """Select rows for a layer from the attention input before it, and start their transfer."""
        request = self.policy.select(
            self.config, layer, following.weights, following.state, a, positions
        )
        with jax.named_scope("fetch"):
            ticket = self.transfer.start(host, following.number, request.slots, self.mesh)
        return Fetched(request, ticket)

    def attend_host_layer(
        self,
        q: Float[Array, "b k g d"],
        fetched: Fetched | None,
        local: Resident,
        host: Float[Array, "l b k t w"] | None,
        number: Int[Array, ""] | None,
        positions: Int[Array, " b"],
    ) -> Float[Array, "b k g d"]:
        """Attention over what is resident and what was fetched, or over everything, streamed."""
        resident = local.part(positions, self.slots)
        if fetched is not None:
            return attend(q, resident, packed(fetched.rows, fetched.request.valid))
        assert self.policy.streams and host is not None and number is not None
        capacity = host.shape[3]
        block = min(capacity, STREAM_BLOCK)
        eligible = self.slots.eligible(positions, capacity)

        def read(i: Array) -> Array:
            return read_block(host, number, i * block, block, self.mesh)

        def visit(i: Array, state: Any) -> Any:
            valid = lax.dynamic_slice_in_dim(eligible, i * block, block, axis=1)[:, None]
            # Slots that were never written may hold NaN, which a weight of 0 does not silence.
            rows = jnp.where(valid[..., None], read(i), 0)
            return extend_softmax(state, q, packed(rows, valid))

        state = extend_softmax(start_softmax(q), q, resident)
        state = lax.fori_loop(jnp.int32(0), jnp.int32(capacity // block), visit, state)
        return finish_softmax(state, q)

    def following(self, weights: Weights, cache: Cache, number: int, at: Any) -> Following | None:
        """The host layer of this number, for the layer before it to speculate."""
        if self.policy.streams or not 0 <= number < self.host_layers:
            return None
        params = weights.params["layers"][self.dense_layers + number]
        return Following(params, weights.policy[number], cache.states[number], at)

    def embed(self, params: Params, tokens: Int[Array, " b"], positions: Int[Array, " b"]) -> Carry:
        """The carry into the first layer."""
        x = self.blueprint.embedding(params).embed(tokens, positions)
        return Carry(x, None, jnp.zeros(tokens.shape, jnp.int32))

    def request_first(
        self, carry: Carry, following: Following, host: Array, positions: Int[Array, " b"]
    ) -> Carry:
        """Fetch for layer 0 when it is on the host: from its own input, with nothing to overlap."""
        layer = self.blueprint.layer(following.params)
        fetched = self.request(layer, following, layer.attention_input(carry.x), host, positions)
        x, rows = self.transfer.wait(fetched.rows, carry.x)
        count = carry.count + jnp.sum(fetched.request.count, axis=-1)
        return Carry(x, Fetched(fetched.request, rows), count)

    def draw(
        self,
        params: Params,
        x: Float[Array, "b e"],
        seed: UInt[Array, ""],
        step: Int[Array, ""],
        sampling: Sampling,
    ) -> Int[Array, " b"]:
        """Next tokens from the last layer's output."""
        with jax.named_scope("sample"):
            logits = self.blueprint.embedding(params).logits(x)
            # The same stream of random numbers for every row: a prompt continues the same way in
            # any place of any batch. (Equal prompts therefore continue equally.)
            rows = jnp.zeros(x.shape[0], jnp.int32)
            keys = None if sampling.greedy else row_keys(seed, rows, step)
            return sample(logits, sampling, keys)

    def flush(self, policy: tuple[Params, ...], cache: Cache) -> Cache:
        """Write the ring of every host layer to the host, and its keys to the policy's state.

        Rows of the `window` tokens before `cache.lengths`. Harmless at any time: rows that the
        host has already are written again, and what lies beyond a sequence's end is never read.
        """
        assert cache.host is not None
        start = jnp.maximum(cache.lengths - self.policy.window, 0)
        host_locals = [local for local in cache.local if isinstance(local, Resident)]
        rows = jnp.stack([local.since(start, self.slots) for local in host_locals])
        host = append_rows(cache.host, rows, start, self.mesh)
        d = self.config.head_dim
        states = tuple(
            self.policy.append(policy[i], cache.states[i], rows[i, ..., :d], start)
            for i in range(self.host_layers)
        )
        return cache._replace(host=host, states=states)


class Steps(NamedTuple):
    """The compiled functions of a Decoder; the cache arrays that they replace are donated.

    `layer` and `fetching_layer` are `decode_layer` without and with rows requested for the next
    layer. Rows that were fetched are not donated: nothing that comes out has their shape twice.
    """

    fused: Any
    embed: Any
    first: Any
    layer: Any
    fetching_layer: Any
    draw: Any
    flush: Any


@functools.lru_cache(maxsize=64)
def steps(decoder: Decoder) -> Steps:
    """Jit a decoder's functions; engines with equal settings share the compilations."""

    def fused(
        weights: Weights,
        host: Array | None,
        states: tuple[Any, ...],
        local: tuple[DenseLayer | Resident, ...],
        positions: Array,
        tokens: Array,
        seed: Array,
        step: Array,
        sampling: Sampling,
    ) -> tuple:
        cache = Cache(host, states, local, positions)
        carry = decoder.embed(weights.params["embedding"], tokens, positions)
        dense = decoder.dense_layers
        number = [jnp.int32(i) for i in range(decoder.host_layers)]
        following = [
            decoder.following(weights, cache, i, number[i]) for i in range(decoder.host_layers)
        ]
        if dense == 0 and host is not None and following[0] is not None:
            carry = decoder.request_first(carry, following[0], host, positions)
        updated = []
        for i, params in enumerate(weights.params["layers"]):
            own = i - dense
            with jax.named_scope(f"layer{i}"):
                carry, new = decoder.decode_layer(
                    params,
                    carry,
                    local[i],
                    host,
                    number[own] if own >= 0 else None,
                    following[own + 1] if 0 <= own + 1 < decoder.host_layers else None,
                    positions,
                )
            updated.append(new)
        drawn = decoder.draw(weights.params["embedding"], carry.x, seed, step, sampling)
        return tuple(updated), positions + 1, drawn, step + 1, carry.count

    def draw(
        params: Params, x: Array, seed: Array, step: Array, positions: Array, sampling: Sampling
    ) -> tuple:
        return decoder.draw(params, x, seed, step, sampling), step + 1, positions + 1

    def flush(policy: Any, local: Any, host: Array, states: Any, lengths: Array) -> tuple:
        cache = decoder.flush(policy, Cache(host, states, local, lengths))
        return cache.host, cache.states

    at: Any = Placement(decoder.mesh)
    fetched = Fetched(Request(at.rows, at.rows), at.rows)
    carry = Carry(at.batch, fetched, at.batch)
    bare = Carry(at.batch, None, at.batch)

    def layer(fetches: bool):
        def run(*arguments: Any) -> tuple:
            return decoder.decode_layer(*arguments)

        out = (carry if fetches else bare, at.rows)
        return jax.jit(run, donate_argnums=2, out_shardings=out)

    return Steps(
        fused=jax.jit(
            fused,
            static_argnames="sampling",
            donate_argnums=3,
            out_shardings=(at.rows, at.batch, at.batch, at.whole, at.batch),
        ),
        embed=jax.jit(decoder.embed, out_shardings=bare),
        first=jax.jit(decoder.request_first, out_shardings=carry),
        layer=layer(fetches=False),
        fetching_layer=layer(fetches=True),
        draw=jax.jit(
            draw, static_argnames="sampling", out_shardings=(at.batch, at.whole, at.batch)
        ),
        flush=jax.jit(flush, donate_argnums=(2, 3), out_shardings=(at.host, at.rows)),
    )
