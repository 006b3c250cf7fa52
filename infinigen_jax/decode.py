"""One decode step: the layer that both schedules share.

    decode_layer:   norm -> speculate layer l+1 -> start its transfer
                         -> attend (sinks, window, fetched rows) -> MLP -> await the transfer

The host cache and the policy's state are read-only inside a step; new rows go to the ring of
resident rows, and from there to the host in `flush`, one donated update every `window` steps.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt

from infinigen_jax import cuda
from infinigen_jax.attention import (
    Part,
    Tail,
    attend,
    attend_weighted,
    extend_softmax,
    finish_softmax,
    join_softmax,
    packed,
    start_softmax,
)
from infinigen_jax.cache import Cache, HostLayer, Local, Resident, Slots
from infinigen_jax.in_place import attend_requested
from infinigen_jax.memory import (
    append_rows,
    capacity_of,
    gather_jobs,
    gather_rows,
    read_block,
)
from infinigen_jax.models import Blueprint, ModelConfig, Params, blueprint
from infinigen_jax.policies.base import Attended, Policy
from infinigen_jax.pool import Kept, Pool, held, touch
from infinigen_jax.reuse import HotSet, plan, plan_by_kernel
from infinigen_jax.rows import RowFormat, row_format
from infinigen_jax.sampling import Sampling, row_keys, sample
from infinigen_jax.selection import Request
from infinigen_jax.span import Span
from infinigen_jax.transfer import Transfer

STREAM_BLOCK = 1024  # tokens of a streamed block


class Following(NamedTuple):
    """What layer l needs of layer l+1 to speculate for it."""

    params: Params
    weights: Params
    state: Any
    number: Int[Array, ""]
    positions: Int[Array, "b k t"] | None = None


class Fetched(NamedTuple):
    """Rows that were requested for a layer, as the host stores them.

    Attributes:
        rows: None where the transfer leaves them in the host cache, see `Transfer.in_place`.
    """

    request: Request
    rows: Shaped[Array, "b k n w"] | None


class Counts(NamedTuple):
    """Rows of a step so far, all layers and KV heads together.

    Attributes:
        selected: that attention wanted from the host cache.
        moved: of these, those that had to come from the host; the hot set had the others.
    """

    selected: Int[Array, " b"]
    moved: Int[Array, " b"]

    def add(self, request: Request, moved: Int[Array, "b k"]) -> "Counts":
        return Counts(
            self.selected + jnp.sum(request.count, axis=-1), self.moved + jnp.sum(moved, axis=-1)
        )


class Carry(NamedTuple):
    """What goes from layer to layer; `fetched` is the next layer's."""

    x: Float[Array, "b e"]
    fetched: Fetched | None
    counts: Counts


class Started(NamedTuple):
    """A transfer under way.

    Attributes:
        moved: rows that really cross, per sequence and KV head.
        hot: the hot set with its directory as it will be, its rows as they were.
        used: of a pool, as it will be.
    """

    request: Request
    ticket: Any
    moved: Int[Array, "b k"]
    hot: HotSet | None
    used: Shaped[Array, "b k t"] | None = None


class Weights(NamedTuple):
    """Everything constant: the model's parameters and the policy's, one per host layer."""

    params: Params
    policy: tuple[Params, ...]


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The pure functions of a step, for one model architecture and one set of choices.

    Attributes:
        dense_layers: leading layers whose cache stays on the device. So does that of layers with
            a sliding window.
        mesh: axes "data" (sequences) and "model" (KV heads).
        rows: format of the host's rows, see `row_format`.
        hot_set: entries of the hot set, in multiples of a request; 0 for none, else at least 1.
        eviction: see `reuse.plan`.
        pool: the limit of the host's cache, if it has one.
        weights_on_host: see `weights`.
    """

    config: ModelConfig
    dtype: jnp.dtype
    policy: Policy
    transfer: Transfer
    dense_layers: int
    mesh: Mesh
    rows: str = "auto"
    hot_set: float = 0.0
    eviction: str = "lru"
    pool: Pool | None = None
    weights_on_host: bool = False

    @property
    def blueprint(self) -> Blueprint:
        return blueprint(self.config, self.dtype)

    @property
    def slots(self) -> Slots:
        return Slots(self.policy.sinks, self.policy.window, self.policy.tail_block)

    @functools.cached_property
    def on_host(self) -> tuple[int, ...]:
        """The layers that have their cache on the host, by their number in the model."""
        layers = range(self.dense_layers, self.config.num_layers)
        return tuple(i for i in layers if self.config.window_of(i) is None)

    @property
    def host_layers(self) -> int:
        """How many layers have their cache on the host."""
        return len(self.on_host)

    def host_number(self, layer: int) -> int:
        """Of a layer of the model, among those on the host; -1 for one that is not."""
        return self.on_host.index(layer) if layer in self.on_host else -1

    def ring_size(self, layer: int, capacity: int) -> int | None:
        """Tokens in the cache of a layer with a sliding window; None for other layers."""
        window = self.config.window_of(layer)
        return None if window is None else min(window, capacity)

    @property
    def row_format(self) -> RowFormat:
        """How the host stores a token's row."""
        return row_format(self.rows, self.dtype, self.config.head_dim)

    def streams(self, number: int) -> bool:
        """Whether this host layer is attended whole, block by block."""
        return self.policy.streams(self.on_host[number])

    @property
    def requests_first(self) -> bool:
        """Whether layer 0 is on the host and no layer before it could request its rows."""
        return self.policy.ahead and self.host_number(0) == 0

    def fetches_for(self, layer: int) -> int:
        """The host layer that rows are requested for in a layer of the model, by its input.

        -1 where there is none.
        """
        return self.host_number(layer + self.policy.ahead)

    def host_slots(self, tokens: int, capacity: int) -> int:
        """Slots of the host's cache for sequences of up to `tokens`; without a pool the capacity.

        Raises:
            InputError: if a pool is too small.
        """
        if self.pool is None:
            return capacity
        return self.pool.slots(tokens, self.policy.sinks, self.policy.window)

    def padded_rows(self, capacity: int) -> int | None:
        """Rows that a step moves per sequence and KV head, whatever is meant, of all layers.

        A request's padding moves with it, and streamed layers are read to the cache's end. None if
        only what is meant moves.
        """
        streamed = sum(self.streams(number) for number in range(self.host_layers))
        selecting = self.host_layers - streamed
        if selecting and (self.transfer.masks or self.hot_set):
            return None
        request = self.policy.request_size(capacity) if selecting else 0
        return streamed * capacity + selecting * request

    def hot_entries(self, capacity: int) -> int:
        """Entries of a layer's hot set, per sequence and KV head."""
        return min(capacity, math.ceil(self.hot_set * self.policy.request_size(capacity)))

    def empty_hot_set(self, batch: int, capacity: int) -> HotSet | None:
        """A hot set for one layer, if there are to be any."""
        size, stored = self.hot_entries(capacity), self.row_format
        if not size:
            return None
        heads = self.config.num_kv_heads
        return HotSet.empty(batch, heads, size, stored.width, capacity, stored.storage)

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
            following: the layer to fetch rows for, if any: the next one, or this one for policies
                that do not look ahead.
            positions: of the current tokens.

        Returns:
            The carry, and the replacements of `local`, `hot` and `state`.
        """
        config = self.config
        layer = self.blueprint.layer(params)
        x, counts = carry.x, carry.counts
        a = layer.attention_input(x)
        started = None
        if following is not None:
            assert host is not None
            next_layer = self.blueprint.layer(following.params)
            started = self.start(next_layer, following, a, hot, host, positions)
            if not self.policy.ahead:
                x, fetched, hot, counts = self.wait(started, x, counts)
                carry, started = carry._replace(fetched=fetched), None
        with jax.named_scope("attention"):
            q = config.grouped(layer.query(a, positions))
            key, value = layer.key_value(a, positions)
            if started is not None:
                ticket, q = self.transfer.behind(started.ticket, q)
                started = started._replace(ticket=ticket)
            if not isinstance(local, Resident):
                local = local.write(key, value, positions)
                o = attend(q, local.part(positions))
            else:
                assert host is not None and own is not None
                local = local.write(jnp.concatenate([key, value], axis=-1), positions, self.slots)
                resident = local.part(positions, self.slots)
                if carry.fetched is not None and self.in_chunks:
                    o = self.attend_chunks(q, resident, carry.fetched, host, local, own, positions)
                elif carry.fetched is not None:
                    fetched_part = self.fetched_part(carry.fetched, host, own)
                    taken = fetched_part.taken(q.shape[-1])
                    tail = self.tail(q, carry.fetched.request, taken, local, own, positions)
                    o, (near, far) = attend_weighted(q, resident, fetched_part, tail=tail)
                    if self.policy.observes:
                        state = self.policy.observe(
                            state,
                            Attended(
                                q,
                                carry.fetched.request.slots,
                                jnp.sum(far, axis=2),
                                self.slots.positions(positions),
                                jnp.sum(near, axis=2),
                            ),
                        )
                else:
                    o = self.attend_streamed(q, resident, host, own, positions)
                    capacity = capacity_of(host, x.shape[0])
                    counts = self.count_streamed(counts, capacity, own, positions)
            x = x + layer.attention_output(o.reshape(o.shape[0], config.num_heads, -1))
        with jax.named_scope("mlp"):
            x = x + layer.mlp(x)
        fetched = None
        if started is not None:
            x, fetched, hot, counts = self.wait(started, x, counts)
        return Carry(x, fetched, counts), local, hot, state

    def start(
        self,
        layer: Any,
        following: Following,
        a: Float[Array, "b e"],
        hot: HotSet | Kept | None,
        host: Shaped[Array, "l a k t w"],
        positions: Int[Array, " b"],
    ) -> Started:
        """Select rows for a layer from the attention input before it, and start their transfer."""
        there = self.held(following.positions, positions)
        limited = () if there is None else (there,)
        request = self.policy.select(
            self.config, layer, following.weights, following.state, a, positions, *limited
        )
        moved, planned, used = request.count, None, None
        if isinstance(hot, Kept):
            assert self.pool is not None
            used, hot = hot
            used = None if used is None else touch(self.pool, used, request, positions)
        if hot is not None:
            with jax.named_scope("reuse"):
                if self.eviction == "lru" and cuda.in_use():
                    hot, planned = plan_by_kernel(hot, request, positions, self.mesh)
                else:
                    hot, planned = plan(hot, request, positions, self.eviction)
                moved = jnp.sum(planned.miss, axis=-1, dtype=jnp.int32)
        request = request._replace(rank=None)
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

    def fetched_part(
        self, fetched: Fetched, host: Shaped[Array, "l a k t w"], own: HostLayer
    ) -> Part:
        """All rows of a request, for attention."""
        rows = fetched.rows
        if rows is None:
            rows = gather_rows(host, own.number, fetched.request.slots, self.mesh)
        return packed(self.row_format.decode(own.scales, rows), fetched.request.valid)

    @property
    def in_chunks(self) -> bool:
        """Whether attention takes as many of the fetched rows as are meant, see `in_place`.

        Where the host's memory is the device's: on the CPU a loop costs little, and a request's
        padding as much as its rows. The weights, which some policies observe, are not kept then.
        """
        return self.transfer.in_place and not self.policy.observes and self.mesh.size == 1

    def attend_chunks(
        self,
        q: Float[Array, "b k g d"],
        resident: Part,
        fetched: Fetched,
        host: Shaped[Array, "l a k t w"],
        local: Resident,
        own: HostLayer,
        positions: Int[Array, " b"],
    ) -> Float[Array, "b k g d"]:
        """Attention over what is resident and what was fetched, as many rows as are meant."""

        def read(head: Array, place: Array, slots: Array) -> Array:
            if fetched.rows is None:
                rows = gather_jobs(host, own.number, head, slots, q.shape[0])
            else:
                rows = fetched.rows.reshape(-1, *fetched.rows.shape[2:])[head[:, None], place][None]
            scales = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1])[head][None], own.scales)
            return self.row_format.decode(scales, rows)

        one_mean = own.tail is None and fetched.request.rest is not None
        softmax, taken = attend_requested(q, fetched.request, read, sums=one_mean)
        softmax = join_softmax(extend_softmax(start_softmax(q), q, resident), softmax)
        tail = self.tail(q, fetched.request, taken, local, own, positions)
        return finish_softmax(softmax, q, tail)

    def tail(
        self,
        q: Float[Array, "b k g d"],
        request: Request,
        taken: Float[Array, "b k d"] | None,
        local: Resident,
        own: HostLayer,
        positions: Int[Array, " b"],
    ) -> Tail | None:
        """What only the host has and was not fetched, as one token, if the policy wants that.

        Args:
            taken: sum of the values that were fetched; for a tail of one mean.
        """
        score = request.rest
        if own.tail is not None:
            return self.tail_blocks(q, request, local, own, positions)
        if score is None:
            return None
        assert local.left is not None and taken is not None
        if own.key_mean is not None:
            mean = own.key_mean.astype(jnp.float32)
            score = score + jnp.einsum("bkgd,kd->bkg", q.astype(jnp.float32), mean)[..., None]
        there = jnp.maximum(positions - self.policy.window + 1 - self.policy.sinks, 0)[:, None]
        if (rows := self.held(own.positions, positions)) is not None:
            there = jnp.sum(rows >= 0, axis=-1, dtype=jnp.int32)
        missing = (there - request.count)[..., None]
        score = jnp.where((missing > 0)[..., None], score, -jnp.inf)
        return Tail(score, local.left - taken[:, :, None], missing)

    def tail_blocks(
        self,
        q: Float[Array, "b k g d"],
        request: Request,
        local: Resident,
        own: HostLayer,
        positions: Int[Array, " b"],
    ) -> Tail:
        """What was not fetched as one token a block, by the scores that the layer's own query has.

        A block's value is the mean of all its tokens that only the host has, fetched or not.
        """
        assert local.left is not None
        with jax.named_scope("tail"):
            score = request.rest
            if score is None:
                weights, state = own.tail
                score = self.policy.own_rest(weights, state, q, request, positions)
            blocks = score.shape[3]
            eligible = self.slots.eligible(positions, blocks * self.policy.tail_block)
            by_block = eligible.reshape(-1, 1, blocks, self.policy.tail_block)
            return Tail(score, local.left, jnp.sum(by_block, axis=-1, dtype=jnp.int32))

    def own_layer(self, weights: Weights, cache: Cache, number: int, at: Any) -> HostLayer | None:
        """Where the host keeps this host layer's rows; None for a number below 0, of no layer."""
        if number < 0:
            return None
        own, scales = weights.policy[number], cache.scales[number]
        if self.slots.tail_block and not self.streams(number):
            return HostLayer(at, scales, tail=(own, cache.states[number]))
        mean = own.get("mean") if self.policy.has_tail else None
        return HostLayer(at, scales, mean, cache.pool_of(number))

    def held(
        self, rows: Int[Array, "b k t"] | None, positions: Int[Array, " b"]
    ) -> Int[Array, "b k t"] | None:
        """Positions of a pool's rows that only the host has; None without a pool."""
        return None if rows is None else held(rows, positions, self.policy.window)

    def on_host_only(
        self, own: HostLayer, capacity: int, positions: Int[Array, " b"]
    ) -> Bool[Array, "b kv t"]:
        """Slots whose rows only the host has, for each KV head or, kv = 1, for all."""
        if (rows := self.held(own.positions, positions)) is not None:
            return rows >= 0
        return self.slots.eligible(positions, capacity)[:, None]

    def attend_streamed(
        self,
        q: Float[Array, "b k g d"],
        resident: Part,
        host: Shaped[Array, "l a k t w"],
        own: HostLayer,
        positions: Int[Array, " b"],
    ) -> Float[Array, "b k g d"]:
        """Attention over what is resident and all that is on the host, block by block."""
        capacity = capacity_of(host, q.shape[0])
        block = min(capacity, STREAM_BLOCK)
        eligible = self.on_host_only(own, capacity, positions)
        # Only a pool may have slots behind its last whole block; they are read with that one's.
        blocks = -(-capacity // block)

        def visit(i: Array, state: Any) -> Any:
            start = i * block
            if capacity % block:
                start = jnp.minimum(start, capacity - block)
            valid = lax.dynamic_slice_in_dim(eligible, start, block, axis=2)
            if capacity % block:
                again = jnp.arange(block, dtype=jnp.int32) < i * block - start
                valid = valid & ~again[None, None]
            rows = read_block(host, own.number, start, block, self.mesh, q.shape[0])
            # Slots that were never written may hold NaN, which a weight of 0 does not silence.
            rows = jnp.where(valid[..., None], self.row_format.decode(own.scales, rows), 0)
            return extend_softmax(state, q, packed(rows, valid))

        state = extend_softmax(start_softmax(q), q, resident)
        state = lax.fori_loop(jnp.int32(0), jnp.int32(blocks), visit, state)
        return finish_softmax(state, q)

    def count_streamed(
        self, counts: Counts, capacity: int, own: HostLayer, positions: Int[Array, " b"]
    ) -> Counts:
        """With all rows of one layer that are on the host only."""
        there = self.on_host_only(own, capacity, positions)
        rows = jnp.sum(there, axis=(1, 2), dtype=jnp.int32)
        rows = rows * (self.config.num_kv_heads // there.shape[1])
        return Counts(counts.selected + rows, counts.moved + rows)

    def following(self, weights: Weights, cache: Cache, number: int, at: Any) -> Following | None:
        """The host layer of this number, for the layer before it to speculate."""
        if not 0 <= number < self.host_layers or self.streams(number):
            return None
        params = weights.params["layers"][self.on_host[number]]
        state = cache.states[number]
        return Following(params, weights.policy[number], state, at, cache.pool_of(number))

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
        started = self.start(layer, following, a, hot, host, positions)
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

    def score(
        self, params: Params, x: Float[Array, "b e"], targets: Int[Array, " b"]
    ) -> tuple[Float[Array, " b"], Int[Array, " b"]]:
        """Natural log-probabilities of given next tokens, float32, and the likeliest tokens."""
        logits = self.blueprint.embedding(params).logits(x).astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return chosen - jax.nn.logsumexp(logits, axis=-1), best

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
