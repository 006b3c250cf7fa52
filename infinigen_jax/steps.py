"""The compiled functions of a decoder, in two schedules of the same layer.

`fused` unrolls all layers into one compiled step, `layerwise` dispatches one compiled call a layer
(one compilation serves all layers of a kind). They trace the same function and give equal results.
Unrolled, not scanned: a scan over stacked weights copies every weight once a token (docs/gpu.md).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from infinigen_jax import pooled
from infinigen_jax.cache import Cache, HostLayer, Local
from infinigen_jax.carry import Carry, Counts, Fetched, Following, Weights
from infinigen_jax.checking import finite_after, first_place
from infinigen_jax.compiler import step_options
from infinigen_jax.decode import Decoder
from infinigen_jax.memory import Placement
from infinigen_jax.models import Params
from infinigen_jax.pool import Kept
from infinigen_jax.reuse import HotSet
from infinigen_jax.sampling import Sampling
from infinigen_jax.selection import Request
from infinigen_jax.weights import await_copy, merged, start_copy, start_next

SCHEDULES = ("fused", "layerwise")


class Watched(NamedTuple):
    """A layer of a step, with all that it read and made, for who studies it.

    Attributes:
        layer: its number in the model.
        params: of this layer.
        before, after: the carry into it and out of it.
        local: its rows on the device, the current token's included.
        own: which of the host's layers it is; None for one that is on the device.
        selection: what its rows are selected by; None for a layer of which none are selected.
        host: the host cache.
        positions: of the current tokens.
    """

    layer: int
    params: Params
    before: Carry
    after: Carry
    local: Local
    own: HostLayer | None
    selection: Following | None
    host: Array | None
    positions: Array


# Given a layer, what to hand to the next one (ordinarily `after`), and a record [b, ...].
Watch = Callable[[Decoder, Watched], tuple[Carry, Any]]


class Steps(NamedTuple):
    """The compiled functions of a Decoder; the cache arrays that they replace are donated.

    `checked` is `fused` that also returns the first place that is not finite, see `checking`;
    `forced` is `fused` for given tokens: it returns the log-probabilities of all next ones, and
    `watched` also what a Watch recorded of every layer. `layer`
    and `fetching_layer` are `decode_layer` without and with rows requested for the next layer. Rows
    that were fetched are not donated: nothing that comes out has their shape twice. `flush_pool`
    takes and replaces a whole cache.
    """

    fused: Any
    checked: Any
    forced: Any
    watched: Any
    embed: Any
    first: Any
    layer: Any
    fetching_layer: Any
    draw: Any
    flush: Any
    flush_pool: Any


@functools.lru_cache(maxsize=64)
def steps(decoder: Decoder) -> Steps:
    """Jit a decoder's functions; engines with equal settings share the compilations."""

    def begin_layer(
        carry: Carry, params: Params | None, stored: Sequence[Params]
    ) -> tuple[Carry, Params, Any]:
        """A layer's parameters on the device, and what the next one has to have brought there.

        Args:
            params: those of this layer, if the layer before it had them brought.
            stored: this layer's and the next one's, wherever they are kept.
        """
        if not decoder.weights_on_host:
            return carry, stored[0], None
        x = carry.x
        if params is None:
            brought, x = start_copy(stored[0], x)
            params = merged(stored[0], brought)
        coming, x = start_next(stored[1:], x)
        return carry._replace(x=x), params, coming

    def end_layer(carry: Carry, coming: Any) -> tuple[Carry, Any]:
        """What the next layer needs is there when this layer is done."""
        coming, x = await_copy(coming, carry.x)
        return carry._replace(x=x), coming

    def layers(
        weights: Weights, cache: Cache, tokens: Array, watch: Watch | None = None
    ) -> tuple[Array, Cache, Counts, tuple[Any, ...]]:
        """All layers of a step.

        Returns:
            The last one's output, the cache with what was replaced in it, counts, and the records
            of `watch`, one a layer.
        """
        records = []
        host, positions, hot = cache.host, cache.lengths, list(cache.hot)
        carry = decoder.embed(weights.params["embedding"], tokens, positions)
        number = [jnp.int32(i) for i in range(decoder.host_layers)]
        following = [
            decoder.following(weights, cache, i, number[i]) for i in range(decoder.host_layers)
        ]
        if decoder.requests_first and following[0] is not None:
            assert host is not None
            carry, hot[0] = decoder.request_first(carry, following[0], hot[0], host, positions)
        local, states = list(cache.local), list(cache.states)
        all_params, params = weights.params["layers"], None
        for i in range(len(all_params)):
            carry, params, coming = begin_layer(carry, params, all_params[i : i + 2])
            own, target = decoder.host_number(i), decoder.fetches_for(i)
            ahead, before = following[target] if target >= 0 else None, carry
            place = decoder.own_layer(weights, cache, own, number[own] if own >= 0 else None)
            with jax.named_scope(f"layer{i}"):
                carry, local[i], new_hot, state = decoder.decode_layer(
                    params,
                    carry,
                    local[i],
                    None if ahead is None else hot[target],
                    states[own] if own >= 0 and decoder.policy.observes else None,
                    host,
                    place,
                    ahead,
                    positions,
                )
            if ahead is not None:
                hot[target] = new_hot
            if own >= 0 and decoder.policy.observes:
                states[own] = state
            carry, coming = end_layer(carry, coming)
            if watch is not None:
                chosen = following[own] if own >= 0 else None
                seen = Watched(i, params, before, carry, local[i], place, chosen, host, positions)
                carry, record = watch(decoder, seen)
                records.append(record)
            params = None if coming is None else merged(all_params[i + 1], coming)
        cache = cache._replace(
            local=tuple(local), hot=tuple(hot), states=tuple(states), lengths=positions + 1
        )
        return carry.x, cache, carry.counts, tuple(records)

    def replaced(cache: Cache) -> Cache:
        """What a step replaces; the rest, which is read only, is left out."""
        states = cache.states if decoder.policy.observes else ()
        return Cache(None, states, cache.local, cache.lengths, (), cache.hot)

    def fused(
        weights: Weights,
        host: Array | None,
        states: tuple[Any, ...],
        scales: tuple[Any, ...],
        local: tuple[Local, ...],
        hot: tuple[HotSet | Kept | None, ...],
        positions: Array,
        tokens: Array,
        seed: Array,
        step: Array,
        sampling: Sampling,
        pool: tuple[Array, ...] = (),
        checks: bool = False,
    ) -> tuple:
        cache = Cache(host, states, local, positions, scales, hot, pool)
        embedding, watch = weights.params["embedding"], finite_after if checks else None
        x, cache, counts, finite = layers(weights, cache, tokens, watch)
        drawn = decoder.draw(embedding, x, seed, step, sampling)
        outcome = replaced(cache), drawn, step + 1, counts
        if not checks:
            return outcome
        ends = decoder.embed(embedding, tokens, positions).x, decoder.logits(embedding, x)
        first, last = (jnp.all(jnp.isfinite(end), axis=-1) for end in ends)
        return *outcome, first_place((first, *finite, last), positions)

    def forced(
        weights: Weights,
        host: Array | None,
        states: tuple[Any, ...],
        scales: tuple[Any, ...],
        local: tuple[Local, ...],
        hot: tuple[HotSet | Kept | None, ...],
        positions: Array,
        tokens: Array,
        pool: tuple[Array, ...] = (),
        watch: Watch | None = None,
    ) -> tuple:
        cache = Cache(host, states, local, positions, scales, hot, pool)
        x, cache, counts, records = layers(weights, cache, tokens, watch)
        log_probs, best = decoder.predict(weights.params["embedding"], x)
        outcome = replaced(cache), log_probs, best, counts
        return outcome if watch is None else (*outcome, records)

    def draw(
        params: Params, x: Array, seed: Array, step: Array, positions: Array, sampling: Sampling
    ) -> tuple:
        return decoder.draw(params, x, seed, step, sampling), step + 1, positions + 1

    def flush(
        policy: Any, local: Any, host: Array, states: Any, scales: Any, lengths: Array
    ) -> tuple:
        cache = decoder.flush(policy, Cache(host, states, local, lengths, scales))
        return cache.host, cache.states

    def flush_pool(policy: Any, cache: Cache) -> Cache:
        return pooled.flush(decoder, policy, cache)

    options = step_options(decoder)
    at: Any = Placement(decoder.mesh)
    rest = at.rows if decoder.policy.has_tail and not decoder.policy.tail_block else None
    fetched = Fetched(Request(at.rows, at.rows, rest), at.rows)
    counts = Counts(at.batch, at.batch)
    carry = Carry(at.batch, fetched, counts)
    bare = Carry(at.batch, None, counts)

    def layer(fetches: bool):
        def run(params: Params, into: Carry, *arguments: Any, stored: Any = ()) -> tuple:
            into, _, coming = begin_layer(into, params, [params, *stored])
            outcome, *rest = decoder.decode_layer(params, into, *arguments)
            outcome, coming = end_layer(outcome, coming)
            return outcome, *rest, coming

        out = (carry if fetches else bare, at.rows, at.rows, at.rows, at.whole)
        return jax.jit(run, donate_argnums=(2, 3, 4), out_shardings=out, compiler_options=options)

    donated = (2, 4, 5) if decoder.policy.observes else (4, 5)
    step = Cache(None, at.rows, at.rows, at.batch, (), at.rows)
    return Steps(
        fused=jax.jit(
            fused,
            static_argnames="sampling",
            donate_argnums=donated,
            out_shardings=(step, at.batch, at.batch, counts),
            compiler_options=options,
        ),
        checked=jax.jit(
            functools.partial(fused, checks=True),
            static_argnames="sampling",
            donate_argnums=donated,
            out_shardings=(step, at.batch, at.batch, counts, at.batch),
            compiler_options=options,
        ),
        forced=jax.jit(
            forced,
            donate_argnums=donated,
            out_shardings=(step, at.batch, at.batch, counts),
            compiler_options=options,
        ),
        watched=jax.jit(
            forced,
            static_argnames="watch",
            donate_argnums=donated,
            out_shardings=(step, at.batch, at.batch, counts, at.batch),
            compiler_options=options,
        ),
        embed=jax.jit(decoder.embed, out_shardings=bare),
        first=jax.jit(decoder.request_first, donate_argnums=2, out_shardings=(carry, at.rows)),
        layer=layer(fetches=False),
        fetching_layer=layer(fetches=True),
        draw=jax.jit(
            draw, static_argnames="sampling", out_shardings=(at.batch, at.batch, at.batch)
        ),
        flush=jax.jit(flush, donate_argnums=(2, 3), out_shardings=(at.host, at.rows)),
        flush_pool=jax.jit(
            flush_pool,
            donate_argnums=1,
            out_shardings=Cache(at.host, at.rows, at.rows, at.batch, at.rows, at.rows, at.rows),
        ),
    )
