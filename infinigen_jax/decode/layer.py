"""Decode step of one layer, shared by both schedules (section 4.3 and figure 8 of the paper).

    decode_layer:   norm -> speculate layer l+1 -> start its transfer
                         -> attend (sinks, window, fetched rows) -> MLP -> await the transfer

`a` is an attention input (a normalised hidden state) and `q` a query. `inputs.place` is where the
host keeps the current layer's rows; `inputs.target` is the layer that rows are requested for.

The policy decides when rows are requested, and by which query. With `Policy.source` "input" it
speculates by the layer's input (figure 8 of the paper), with "resident" after attention to the
resident rows: a more accurate guess that waits for no transfer. With `Policy.lead` 0 a layer
selects by its own query: it starts and awaits its own transfer before its attention.

A step only reads the host cache, and the policy's state unless the policy observes. New rows go to
the ring of resident rows. `flush` writes the ring to the host in one donated update every `window`
steps.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from infinigen_jax.cache.cache import Cache
from infinigen_jax.cache.host_array import capacity_of, gather_rows, store_rows, write_span
from infinigen_jax.cache.hot_set import forget, replace_entries
from infinigen_jax.cache.layers import Resident, storage_error, sums_of_values
from infinigen_jax.cache.pool import Hot, held, insert, touch
from infinigen_jax.decode.layer_rows import DeviceRows, HostRows, layer_rows
from infinigen_jax.decode.layout import Layout
from infinigen_jax.decode.state import (
    Carry,
    Counts,
    Fetched,
    LayerInputs,
    LayerState,
    Started,
    Target,
)
from infinigen_jax.errors import ParameterError
from infinigen_jax.models import Params
from infinigen_jax.models.llama import Layer
from infinigen_jax.ops.attention import attend
from infinigen_jax.ops.span import Span
from infinigen_jax.policies.base import Lookup
from infinigen_jax.selection.select import Request


class Decoder(Layout):
    """Pure functions of a decode step, for one layout."""

    def decode_layer(
        self, inputs: LayerInputs, state: LayerState, carry: Carry
    ) -> tuple[Carry, LayerState]:
        """Compute one layer of a step: speculate, start the transfer, attend, MLP, wait.

        `carry.fetched` holds this layer's rows if an earlier layer requested them; on return, the
        rows for the next layer.
        """
        layer, rows = self.blueprint.layer(inputs.params), layer_rows(self, inputs, state)
        a, positions = layer.attention_input(carry.x), inputs.positions
        # `hot` is the target's. With an own query, `carry` now has this layer's rows.
        carry, started, hot = self.request_by_input(inputs, a, carry, state.hot)
        with jax.named_scope("attention"):
            q = layer.config.grouped(layer.query(a, positions))
            key, value = layer.key_value(a, positions)
            q = self.tie(started, q)
            rows = rows.write(key, value)
            started, q = self.request_by_resident(inputs, started, carry.x, a, q, rows, hot)
            o, rows, counts = rows.attend(q, carry)
            x = carry.x + self.output(layer, o, a)
        with jax.named_scope("mlp"):
            x = layer.after_mlp(x, a)
        carry, hot = self.wait(started, Carry(x, None, counts), hot)
        return carry, LayerState(rows.local, hot, rows.observed)

    def output(
        self, layer: Layer, o: Float[Array, "b k g d"], a: Float[Array, "b e"]
    ) -> Float[Array, "b e"]:
        """Project the attention of all heads back to the hidden size; `a` is the layer's input."""
        return layer.attention_output(o.reshape(o.shape[0], self.config.num_heads, -1), a)

    def request_by_input(
        self, inputs: LayerInputs, a: Float[Array, "b e"], carry: Carry, hot: Hot
    ) -> tuple[Carry, Started | None, Hot]:
        """Request rows by a layer's input: those of its target, or its own, which it awaits.

        Return the carry, with the layer's rows if it selects by its own query, the transfer under
        way, if any, and the new `Hot`.
        """
        target, place = inputs.target, inputs.place
        if target is not None:
            early = self.policy.source == "input"
            return carry, self.start(inputs, target, a, hot) if early else None, hot
        if self.policy.lead or place is None or place.weights is None:
            return carry, None, hot
        own = Target(inputs.params, place.weights, place.state, place.number, place.positions)
        carry, hot = self.wait(self.start(inputs, own, a, hot), carry, hot)
        return carry, None, hot

    def request_by_resident(
        self,
        inputs: LayerInputs,
        started: Started | None,
        x: Float[Array, "b e"],
        a: Float[Array, "b e"],
        q: Float[Array, "b k g d"],
        rows: DeviceRows | HostRows,
        hot: Hot,
    ) -> tuple[Started | None, Float[Array, "b k g d"]]:
        """Request the target's rows after attention to the resident rows, if the policy says so.

        Return the transfer under way, if any, and the query, tied to a new request.
        """
        if inputs.target is None or self.policy.source != "resident":
            return started, q
        with jax.named_scope("resident"):
            o = attend(q, rows.near(), cap=self.config.attention_softcap)
            x = x + self.output(self.blueprint.layer(inputs.params), o, a)
        # Normalise with the parameters of the layer whose input `x` approximates.
        a = self.blueprint.layer(inputs.target.params).attention_input(x)
        started = self.start(inputs, inputs.target, a, hot)
        return started, self.tie(started, q)

    def start(
        self, inputs: LayerInputs, target: Target, a: Float[Array, "b e"], hot: Hot
    ) -> Started:
        """Select rows for a layer by its approximate attention input, and start their transfer."""
        assert inputs.host is not None
        request = self.select(target, a, inputs.positions, capacity_of(inputs.host, len(a)))
        (used, entries), moved, replacement, rows = hot, request.count, None, None
        if used is not None:
            assert self.pool is not None
            used = touch(self.pool, used, request, inputs.positions)
        if entries is not None:
            with jax.named_scope("reuse"):
                given = entries, request, inputs.positions, self.mesh
                entries, replacement = replace_entries(*given)
                moved, rows = jnp.sum(replacement.miss, axis=-1, dtype=jnp.int32), entries.rows
        # Only attention that reads rows in the host cache uses marks.
        marks = request.marks if self.in_chunks and entries is None else None
        request = request._replace(chosen=None, marks=marks)
        fetch = inputs.host, target.number, request, rows, replacement, self.mesh
        with jax.named_scope("fetch"):
            return Started(request, self.transfer.fetch(*fetch), moved, Hot(used, entries))

    def select(
        self, target: Target, a: Float[Array, "b e"], positions: Int[Array, " b"], capacity: int
    ) -> Request:
        """Ask the policy for the rows that a layer requests, at most `request_size(capacity)`."""
        rows, size = target.positions, self.request_size(capacity)
        request = self.policy.select(
            Lookup(
                config=self.config,
                layer=self.blueprint.layer(target.params),
                weights=target.weights,
                state=target.state,
                a=a,
                positions=positions,
                number=target.number,
                size=size,
                capacity=capacity,
                share=target.weights.get("share"),
                held=None if rows is None else held(rows, positions, self.policy.window),
                exceeded=self.exceeded,
            )
        )
        if not isinstance(request, Request):
            problem = f"`select` returned {type(request).__name__}, not a Request"
            raise ParameterError("policy", problem, self.policy.name)
        expected = len(a), self.config.num_kv_heads, size
        if request.slots.shape != expected or request.count.shape != expected[:2]:
            shapes = f"{list(request.slots.shape)} and counts {list(request.count.shape)}"
            problem = f"`select` returned slots {shapes}; give {list(expected)} and a count of each"
            raise ParameterError("policy", problem, self.policy.name)
        return request

    def tie(self, started: Started | None, q: Array) -> Array:
        """Keep the work on a query apart from the work that leads to a request.

        XLA would merge products of both, and the transfer would start only after all of them.
        """
        if started is None or not self.transfer.concurrent:
            return q
        return lax.optimization_barrier((started.request.slots, q))[1]

    def wait(self, started: Started | None, carry: Carry, hot: Hot) -> tuple[Carry, Hot]:
        """Await a transfer after the work on `carry.x`, and put its rows in the carry."""
        if started is None:
            return carry, hot
        with jax.named_scope("wait"):
            # Without this barrier XLA would await a copy early, not at the end of the layer.
            x, (rows, hot_rows) = lax.optimization_barrier((carry.x, started.arrays))
        used, entries = started.hot
        hot = Hot(used, None if entries is None else entries._replace(rows=hot_rows))
        counts = carry.counts.add(started.request.count, started.moved)
        return Carry(x, Fetched(started.request, rows), counts), hot

    def embed(self, params: Params, tokens: Int[Array, " b"], positions: Int[Array, " b"]) -> Carry:
        """Return the carry into the first layer."""
        x = self.blueprint.embedding(params).embed(tokens, positions)
        none = jnp.zeros(tokens.shape, jnp.int32)
        return Carry(x, None, Counts(none, none))

    def request_first(self, inputs: LayerInputs, hot: Hot, carry: Carry) -> tuple[Carry, Hot]:
        """Fetch the rows of layer 0, the target, if it is on the host; nothing overlaps this."""
        assert inputs.target is not None
        attention_input = self.blueprint.layer(inputs.params).attention_input(carry.x)
        return self.wait(self.start(inputs, inputs.target, attention_input, hot), carry, hot)

    def logits(self, params: Params, x: Float[Array, "*b e"]) -> Float[Array, "*b v"]:
        """Return the logits of the next tokens, float32, from the last layer's output."""
        return self.blueprint.embedding(params).logits(x)

    def predict(
        self, params: Params, x: Float[Array, "b e"]
    ) -> tuple[Float[Array, "b v"], Int[Array, " b"]]:
        """Return the next tokens' logits, float32, and the most likely tokens."""
        with jax.named_scope("sample"):
            logits = self.logits(params, x).astype(jnp.float32)
            return logits, lax.argmax(logits, 1, jnp.int32)

    def flush(
        self,
        weights: Params,
        number: Int[Array, ""],
        host: Shaped[Array, "l a k t w"],
        state: Any,
        local: Resident,
        scales: Any,
        lengths: Int[Array, " b"],
        *,
        streams: bool,
    ) -> tuple[Shaped[Array, "l a k t w"], Any]:
        """Write the ring of host layer `number`, the `window` tokens before `lengths`, to the host.

        Its keys go to the policy's state, which a layer that `streams` does not have. The call is
        idempotent: rows that the host already has are written again.
        """
        start = jnp.maximum(lengths - self.policy.window, 0)
        span = Span(start, jnp.minimum(lengths, self.policy.window))
        rows = local.since(start, self.slots)
        host = write_span(host, number, self.row_format.encode(scales, rows), span, self.mesh)
        if streams:
            return host, state
        keys = rows[..., : self.config.head_dim]
        return host, self.policy.append(weights, state, keys, span)

    def flush_pool(self, weights: tuple[Params, ...], cache: Cache) -> Cache:
        """Flush all rings into free or evicted slots of a pool; rows that it has stay there."""
        assert cache.host is not None and self.pool is not None
        window = self.policy.window
        start = jnp.maximum(cache.lengths - window, 0)
        span = Span(start, jnp.full_like(start, window))
        local, states, hot = list(cache.local), list(cache.states), list(cache.hot)
        stored, places = [], []
        for i, layer in enumerate(self.on_host):
            resident, (used, entries) = local[layer], hot[i]
            assert isinstance(resident, Resident)
            rows = resident.since(start, self.slots)
            stored.append(self.row_format.encode(cache.scales[i], rows))
            positions = span.positions(window)
            # Without counts of use, as of a streamed layer, rows are evicted in order of age.
            place = insert(
                self.pool, cache.pool[i], used, positions, cache.lengths, self.policy.sinks
            )
            places.append(place)
            if resident.left is not None:
                # Evicted rows are read back in their stored form. New rows later enter the sum in
                # their original form, so the rounding error of storing them is added here.
                capacity = cache.host.shape[3]
                old = jnp.minimum(place.slots, capacity - 1)
                evicted = gather_rows(cache.host, jnp.int32(i), old, self.mesh)
                evicted = self.row_format.decode(cache.scales[i], evicted)
                left = resident.left - sums_of_values(evicted, place.evicted)
                kept_rows, scales = place.slots < capacity, cache.scales[i]
                left += storage_error(self.row_format, scales, stored[i], rows, kept_rows)
                local[layer] = resident._replace(left=left)
            hot[i] = Hot(place.used, None if entries is None else forget(entries, place.slots))
            if not self.streams(i):
                keys = rows[..., : self.config.head_dim]
                states[i] = self.policy.append(weights[i], states[i], keys, span, place.slots)
        slots = jnp.stack([place.slots for place in places])
        return cache._replace(
            host=store_rows(cache.host, jnp.stack(stored), slots, self.mesh),
            states=tuple(states),
            local=tuple(local),
            hot=tuple(hot),
            pool=tuple(place.positions for place in places),
        )
