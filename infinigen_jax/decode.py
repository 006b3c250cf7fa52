"""One decode step: the layer that both schedules share.

    decode_layer:   norm -> speculate layer l+1 -> start its transfer
                         -> attend (sinks, window, fetched rows) -> MLP -> await the transfer

A policy that speculates after attention to the resident rows (`Policy.source`) does so before
attention to the rows that were fetched; one that selects by a layer's own query (`Policy.lead` 0)
starts and awaits that layer's rows before its attention.

The host cache and the policy's state are read-only inside a step; new rows go to the ring of
resident rows, and from there to the host in `flush`, one donated update every `window` steps.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped, UInt

from infinigen_jax import cuda
from infinigen_jax.attention import attend
from infinigen_jax.cache import Cache, HostLayer, Local, Resident
from infinigen_jax.carry import Carry, Counts, Fetched, Following, Own, Started, Weights
from infinigen_jax.host_attention import attend_fetched, attend_streamed, count_streamed, held
from infinigen_jax.layout import Layout
from infinigen_jax.memory import append_rows, capacity_of
from infinigen_jax.models import Params
from infinigen_jax.models.base import Layer
from infinigen_jax.pool import Kept, touch
from infinigen_jax.reuse import HotSet, plan, plan_by_kernel
from infinigen_jax.sampling import Sampling, row_keys, sample
from infinigen_jax.span import Span


@dataclasses.dataclass(frozen=True)
class Decoder(Layout):
    """The pure functions of a step, for one layout."""

    def decode_layer(
        self,
        params: Params,
        carry: Carry,
        local: Local,
        hot: HotSet | Kept | None,
        state: Any,
        host: Shaped[Array, "l a k t w"] | None,
        own: HostLayer | None,
        following: Following | None,
        positions: Int[Array, " b"],
    ) -> tuple[Carry, Local, HotSet | Kept | None, Any]:
        """One layer of a step.

        Args:
            params: of this layer.
            carry: from the layer before; its `fetched` is this layer's.
            local: this layer's rows on the device.
            hot: the hot set of the layer in `following`, if it has one; of a pool, what it keeps.
            state: the policy's for this layer, if the policy observes; else None.
            host: the host cache, read-only.
            own: which of the host's layers this one is; None for one that is on the device.
            following: the layer to fetch rows for, see `Layout.fetches_for`; None if none needs
                any.
            positions: of the current tokens.

        Returns:
            The carry, the replacement of `local`, that of `hot`, and that of `state`.
        """
        layer = self.blueprint.layer(params)
        x, fetched, counts = carry.x, carry.fetched, carry.counts
        a = layer.attention_input(x)
        started = new_hot = None
        if following is not None and self.policy.source == "input":
            started = self.start(following, a, hot, host, positions)
        if started is not None and self.policy.lead == 0:
            x, fetched, new_hot, counts = self.wait(started, x, counts)
            started = None
        with jax.named_scope("attention"):
            q = self.config.grouped(layer.query(a, positions))
            key, value = layer.key_value(a, positions)
            started, q = self.tie(started, q)
            local = self.write(local, key, value, own, positions)
            if following is not None and self.policy.source == "resident":
                near = self.stand_in(following, self.near(layer, x, q, local, positions))
                started, q = self.tie(self.start(following, near, hot, host, positions), q)
            if not isinstance(local, Resident):
                o = attend(q, local.part(positions, self.dtype))
            else:
                assert host is not None and own is not None
                if fetched is not None:
                    o, seen = attend_fetched(self, q, fetched, host, local, own, positions)
                    state = state if seen is None else self.policy.observe(state, seen)
                else:
                    o = attend_streamed(self, q, local, host, own, positions)
                    capacity = capacity_of(host, x.shape[0])
                    counts = count_streamed(self, counts, capacity, own, positions)
            x = x + self.output(layer, o)
        with jax.named_scope("mlp"):
            x = x + layer.mlp(x)
        fetched = None
        if started is not None:
            x, fetched, new_hot, counts = self.wait(started, x, counts)
        return Carry(x, fetched, counts), local, new_hot, state

    def write(
        self,
        local: Local,
        key: Float[Array, "b k d"],
        value: Float[Array, "b k d"],
        own: HostLayer | None,
        positions: Int[Array, " b"],
    ) -> Local:
        """Put the current tokens' keys and values among a layer's rows on the device."""
        if not isinstance(local, Resident):
            return local.write(key, value, positions)
        assert own is not None
        row = jnp.concatenate([key, value], axis=-1)
        summed = self.summed(own.tail[0] if own.tail else {})
        return local.write(row, positions, self.slots, summed)

    def near(
        self,
        layer: Layer,
        x: Float[Array, "b e"],
        q: Float[Array, "b k g d"],
        local: Local,
        positions: Int[Array, " b"],
    ) -> Float[Array, "b e"]:
        """The hidden state after attention to the resident rows alone."""
        with jax.named_scope("resident"):
            return x + self.output(layer, attend(q, local.near(positions, self.slots, self.dtype)))

    def output(self, layer: Layer, o: Float[Array, "b k g d"]) -> Float[Array, "b e"]:
        """Project the attention of all heads back to the hidden size."""
        return layer.attention_output(o.reshape(o.shape[0], self.config.num_heads, -1))

    def stand_in(self, following: Following, x: Float[Array, "b e"]) -> Float[Array, "b e"]:
        """A hidden state under the norm of the layer whose input it stands in for."""
        return self.blueprint.layer(following.params).attention_input(x)

    def tie(self, started: Started | None, x: Array) -> tuple[Started | None, Array]:
        """Put a transfer in front of the work on x."""
        if started is None:
            return None, x
        ticket, x = self.transfer.behind(started.ticket, x)
        return started._replace(ticket=ticket), x

    def start(
        self,
        following: Following,
        a: Float[Array, "b e"],
        hot: HotSet | Kept | None,
        host: Shaped[Array, "l a k t w"] | None,
        positions: Int[Array, " b"],
    ) -> Started:
        """Select rows for a layer by what stands in for its input, and start their transfer."""
        assert host is not None
        layer = self.blueprint.layer(following.params)
        there = held(self, following.positions, positions)
        limited = () if there is None else (there,)
        policy = self.policy if following.own is None else following.own.policy
        request = policy.select(
            self.config, layer, following.weights, following.state, a, positions, *limited
        )
        moved, planned, used = request.count, None, None
        if isinstance(hot, Kept):
            assert self.pool is not None
            used, hot = hot
            used = None if used is None else touch(self.pool, used, request, positions)
        if hot is not None:
            with jax.named_scope("reuse"):
                if cuda.in_use():
                    hot, planned = plan_by_kernel(hot, request, positions, self.mesh)
                else:
                    hot, planned = plan(hot, request, positions)
                moved = jnp.sum(planned.miss, axis=-1, dtype=jnp.int32)
        marks = request.marks if self.in_chunks and hot is None else None
        request = request._replace(chosen=None, marks=marks)
        with jax.named_scope("fetch"):
            ticket = self.transfer.start(
                host,
                following.number,
                request,
                None if hot is None else hot.rows,
                planned,
                self.mesh,
            )
        return Started(request, ticket, moved, hot, used)

    def wait(
        self, started: Started, x: Float[Array, "b e"], counts: Counts
    ) -> tuple[Float[Array, "b e"], Fetched, HotSet | Kept | None, Counts]:
        """Await the rows that were started, behind the work on x."""
        with jax.named_scope("wait"):
            x, rows, hot_rows = self.transfer.wait(started.ticket, x)
        hot = None
        if started.hot is not None:
            assert hot_rows is not None
            hot = started.hot._replace(rows=hot_rows)
        if self.pool is not None:
            hot = Kept(started.used, hot)
        return x, Fetched(started.request, rows), hot, counts.add(started.request, started.moved)

    def own_layer(self, weights: Weights, cache: Cache, number: int, at: Any) -> HostLayer | None:
        """Where the host keeps this host layer's rows; None for a number below 0, of no layer."""
        if number < 0:
            return None
        own, scales = weights.policy[number], cache.scales[number]
        if self.slots.tail_block and not self.streams(number):
            return HostLayer(at, scales, tail=(own, cache.states[number]))
        mean = own.get("mean") if self.policy.has_tail else None
        return HostLayer(at, scales, mean, cache.pool_of(number))

    def following(self, weights: Weights, cache: Cache, number: int, at: Any) -> Following | None:
        """The host layer of this number, for a layer before it to speculate."""
        if not 0 <= number < self.host_layers or self.streams(number):
            return None
        params = weights.params["layers"][self.on_host[number]]
        state = cache.states[number]
        own = None if self.curves is None else Own(self.policies[number])
        return Following(params, weights.policy[number], state, at, cache.pool_of(number), own)

    def embed(self, params: Params, tokens: Int[Array, " b"], positions: Int[Array, " b"]) -> Carry:
        """The carry into the first layer."""
        x = self.blueprint.embedding(params).embed(tokens, positions)
        none = jnp.zeros(tokens.shape, jnp.int32)
        return Carry(x, None, Counts(none, none))

    def request_first(
        self,
        carry: Carry,
        following: Following,
        hot: HotSet | Kept | None,
        host: Array,
        positions: Int[Array, " b"],
    ) -> tuple[Carry, HotSet | Kept | None]:
        """Fetch for layer 0 when it is on the host: from its own input, with nothing to overlap."""
        layer = self.blueprint.layer(following.params)
        a = layer.attention_input(carry.x)
        started = self.start(following, a, hot, host, positions)
        x, fetched, hot, counts = self.wait(started, carry.x, carry.counts)
        return Carry(x, fetched, counts), hot

    def draw(
        self,
        params: Params,
        x: Float[Array, "b e"],
        seed: UInt[Array, ""],
        step: Int[Array, " b"],
        sampling: Sampling,
    ) -> Int[Array, " b"]:
        """Next tokens from the last layer's output; each row's own `step`, see `row_keys`."""
        with jax.named_scope("sample"):
            logits = self.logits(params, x)
            # The same stream of random numbers for every row: a prompt continues the same way in
            # any place of any batch. (Equal prompts therefore continue equally.)
            rows = jnp.zeros(x.shape[0], jnp.int32)
            keys = None if sampling.greedy else row_keys(seed, rows, step)
            return sample(logits, sampling, keys)

    def logits(self, params: Params, x: Float[Array, "b e"]) -> Float[Array, "b v"]:
        """Of the next tokens, from the last layer's output; float32."""
        return self.blueprint.embedding(params).logits(x)

    def predict(
        self, params: Params, x: Float[Array, "b e"]
    ) -> tuple[Float[Array, "b v"], Int[Array, " b"]]:
        """Natural log-probabilities of all next tokens, float32, and the likeliest tokens."""
        logits = self.logits(params, x).astype(jnp.float32)
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return jax.nn.log_softmax(logits, axis=-1), best

    def flush(self, policy: tuple[Params, ...], cache: Cache) -> Cache:
        """Write the ring of every host layer to the host, and its keys to the policy's state.

        Rows of the `window` tokens before `cache.lengths`. Harmless at any time: rows that the
        host has already are written again, and what lies beyond a sequence's end is never read.
        """
        assert cache.host is not None
        start = jnp.maximum(cache.lengths - self.policy.window, 0)
        host_locals = [local for local in cache.local if isinstance(local, Resident)]
        rows = [local.since(start, self.slots) for local in host_locals]
        pairs = zip(cache.scales, rows, strict=True)
        stored = jnp.stack([self.row_format.encode(scales, rows) for scales, rows in pairs])
        host = append_rows(cache.host, stored, start, self.mesh)
        d = self.config.head_dim
        span = Span(start, jnp.minimum(cache.lengths, self.policy.window))
        states = tuple(
            state
            if self.streams(i)
            else self.policy.append(policy[i], state, rows[i][..., :d], span)
            for i, state in enumerate(cache.states)
        )
        return cache._replace(host=host, states=states)
