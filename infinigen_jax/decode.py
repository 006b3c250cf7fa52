"""One decode step: the layer that both schedules share.

    decode_layer:   norm -> speculate layer l+1 -> start its transfer
                         -> attend (sinks, window, fetched rows) -> MLP -> await the transfer

Two layers ahead (`Policy.lead`) it is layer l+2 that is speculated, and the transfer that layer
l-1 started for l+1 that is awaited. A policy that speculates behind the attention (`Policy.source`)
does so in front of the MLP; one that does behind attention to what is resident, in front of
attention to the rows that were fetched.

The host cache and the policy's state are read-only inside a step; new rows go to the ring of
resident rows, and from there to the host in `flush`, one donated update every `window` steps.
"""

import dataclasses
from collections.abc import Callable
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
        hot: tuple[HotSet | Kept | None, ...],
        state: Any,
        host: Shaped[Array, "l a k t w"] | None,
        own: HostLayer | None,
        following: tuple[Following | None, ...],
        positions: Int[Array, " b"],
        number: int = 0,
    ) -> tuple[Carry, Local, HotSet | Kept | None, Any]:
        """One layer of a step.

        Args:
            params: of this layer.
            carry: from the layer before; its `fetched` is this layer's.
            local: this layer's rows on the device.
            hot: the hot sets of the layers in `following`, if they have one; of a pool, what it
                keeps.
            state: the policy's for this layer, if the policy observes; else None.
            host: the host cache, read-only.
            own: which of the host's layers this one is; None for one that is on the device.
            following: the layers to fetch rows for, see `Layout.fetches_for`; None for one that
                needs none.
            positions: of the current tokens.
            number: of this layer; read where rows are requested more than one layer ahead.

        Returns:
            The carry, the replacement of `local`, that of the hot set of the layer whose rows were
            awaited (`Layout.awaits_for`), and that of `state`.
        """
        config = self.config
        layer = self.blueprint.layer(params)
        x, counts = carry.x, carry.counts
        a = layer.attention_input(x)
        new_hot, lead = None, self.policy.lead
        started: list[Started | None] = []

        def start_all(source: Callable[[Following], Array]) -> None:
            for i, target in enumerate(following):
                if target is None:
                    started.append(None)
                    continue
                # In turn, so that a transfer can be awaited while the one behind it goes on.
                lane = (number + lead - len(following) + 1 + i) % max(lead, 1)
                started.append(self.start(target, source(target), hot[i], host, positions, lane))

        def behind_resident(q: Array, local: Local) -> Array:
            """The query, behind the start of transfers that wait for what is resident alone."""
            if self.policy.source != "resident":
                return q
            near = x
            if any(target is not None for target in following):
                with jax.named_scope("resident"):
                    o = attend(q, local.near(positions, self.slots, self.dtype))
                    near = x + layer.attention_output(o.reshape(len(o), config.num_heads, -1))
            start_all(lambda target: self.stand_in(target, near))
            return self.tie(started, q)

        if self.policy.source == "input":
            start_all(lambda target: a)
        if lead == 0 and (at_once := started.pop()) is not None:
            x, fetched, new_hot, counts = self.wait(at_once, x, counts)
            carry = carry._replace(fetched=fetched)
        with jax.named_scope("attention"):
            q = config.grouped(layer.query(a, positions))
            key, value = layer.key_value(a, positions)
            q = self.tie(started, q)
            if not isinstance(local, Resident):
                local = local.write(key, value, positions)
                q = behind_resident(q, local)
                o = attend(q, local.part(positions, self.dtype))
            else:
                assert host is not None and own is not None
                row = jnp.concatenate([key, value], axis=-1)
                summed = self.summed(own.tail[0] if own.tail else {})
                local = local.write(row, positions, self.slots, summed)
                q = behind_resident(q, local)
                if carry.fetched is not None:
                    o, seen = attend_fetched(self, q, carry.fetched, host, local, own, positions)
                    if seen is not None:
                        state = self.policy.observe(state, seen)
                else:
                    o = attend_streamed(self, q, local, host, own, positions)
                    capacity = capacity_of(host, x.shape[0])
                    counts = count_streamed(self, counts, capacity, own, positions)
            x = x + layer.attention_output(o.reshape(o.shape[0], config.num_heads, -1))
        if self.policy.source == "attention":
            start_all(lambda target: self.stand_in(target, x))
            x = self.tie(started, x)
        with jax.named_scope("mlp"):
            x = x + layer.mlp(x)
        fetched, coming = None, [*carry.coming, *started]
        if coming and (awaited := coming.pop(0)) is not None:
            x, fetched, new_hot, counts = self.wait(awaited, x, counts)
        return Carry(x, fetched, counts, tuple(coming)), local, new_hot, state

    def stand_in(self, following: Following, x: Float[Array, "b e"]) -> Float[Array, "b e"]:
        """A hidden state under the norm of the layer whose input it stands in for."""
        return self.blueprint.layer(following.params).attention_input(x)

    def tie(self, started: list[Started | None], x: Array) -> Array:
        """Put transfers in front of the work on x."""
        for i, begun in enumerate(started):
            if begun is not None:
                ticket, x = self.transfer.behind(begun.ticket, x)
                started[i] = begun._replace(ticket=ticket)
        return x

    def start(
        self,
        following: Following,
        a: Float[Array, "b e"],
        hot: HotSet | Kept | None,
        host: Shaped[Array, "l a k t w"] | None,
        positions: Int[Array, " b"],
        lane: int = 0,
    ) -> Started:
        """Select rows for a layer by what stands in for its input, and start their transfer.

        Args:
            lane: see `Transfer.start`.
        """
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
                lane,
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
