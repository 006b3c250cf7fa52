"""Decode step as a loop over layers, compiled for the two schedules.

`layerwise` runs the loop in Python over programs of one layer. It compiles one program for each
kind of layer, so compilation time does not grow with the number of layers. `fused` compiles the
whole loop: one call per token, compiled again for each number of layers. Both run the same `step`
and give equal results.

The loop is unrolled, not scanned: a scan over stacked weights copies every weight once per token
(docs/gpu.md).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Array, Float, Int

from infinigen_jax.cache.cache import Cache, HostLayer, ReadCache, StepCache
from infinigen_jax.cache.host_array import Placement
from infinigen_jax.cache.layers import Local
from infinigen_jax.decode import pool_flush as pooled
from infinigen_jax.decode.compiler_options import step_options
from infinigen_jax.decode.finite_check import finite_after, first_place
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.decode.state import Carry, Counts, LayerInputs, LayerState, Target, Weights
from infinigen_jax.models import Params
from infinigen_jax.programs.program import Program
from infinigen_jax.transfer.host_weights import await_copy, merged, start_copy, start_next


class Watched(NamedTuple):
    """One layer of a step with its inputs and outputs, for a `Watch` function.

    Attributes:
        before, after: carry into the layer and out of it.
        local: rows of the layer on the device, including the current token's.
        place: place of the layer's rows on the host; None for a layer on the device.
        selection: target that the layer's rows are selected for; None if none are selected.
    """

    params: Params
    before: Carry
    after: Carry
    local: Local
    place: HostLayer | None
    selection: Target | None
    host: Array | None
    positions: Array


# Map a layer to the carry for the next one (normally `after`) and a record [b, ...].
Watch = Callable[[Decoder, Watched], tuple[Carry, Any]]


class Pieces(NamedTuple):
    """Functions that make up a step: traced into one program, or compiled one by one.

    Attributes:
        embed: (params, tokens, positions) -> carry into the first layer.
        bring: (params, x) -> a layer's parameters copied from host memory, and x.
        first: `Decoder.request_first`.
        layer: (inputs, state, carry) -> carry, state, and the next layer's parameters if they
            are in host memory.
    """

    embed: Callable[..., Any]
    bring: Callable[..., Any]
    first: Callable[..., Any]
    layer: Callable[..., Any]


def step(
    decoder: Decoder,
    pieces: Pieces,
    numbers: Sequence[Int[Array, ""]],
    weights: Weights,
    read: ReadCache,
    live: StepCache,
    tokens: Int[Array, " b"],
    watch: Watch | None = None,
) -> tuple[Float[Array, "b e"], StepCache, Counts, tuple[Any, ...]]:
    """Run all layers over the tokens at the next position.

    Args:
        numbers: indices of the host layers, as device scalars.
        watch: function called after every layer, if any.

    Returns:
        The last layer's output; the new cache arrays, with `lengths` unchanged; rows selected
        and moved; and the records of `watch`, one per layer.
    """
    # `local` is indexed by layer of the model; `hot` and `states` by host layer. A `target` is the
    # host layer that rows are requested for, -1 for none.
    local, hot, states = list(live.local), list(live.hot), list(live.states)
    stored, records = weights.params["layers"], []  # parameters, on the device or in host memory
    carry = pieces.embed(weights.params["embedding"], tokens, live.lengths)
    params, x = pieces.bring(stored[0], carry.x)
    carry = carry._replace(x=x)

    def inputs_of(layer: int, params: Params, target: int) -> LayerInputs:
        host_index, all_states = decoder.host_number(layer), states or read.states
        place_index = numbers[host_index] if host_index >= 0 else None
        if not decoder.policy.lead:
            target = -1  # a layer that selects by its own query is described by `place`
        target_index = None if target < 0 else numbers[target]
        return LayerInputs(
            params,
            stored[layer + 1 : layer + 2] if decoder.weights_on_host else [],
            read.host,
            decoder.place(weights, read, host_index, place_index),
            decoder.target(weights, read, all_states, target, target_index),
            live.lengths,
        )

    if decoder.requests_first:
        carry, hot[0] = pieces.first(inputs_of(0, params, 0)._replace(upcoming=[]), hot[0], carry)
    for i in range(len(stored)):
        host_index, target = decoder.host_number(i), decoder.fetches_for(i)
        inputs, before = inputs_of(i, params, target), carry
        observed = states[host_index] if host_index >= 0 and states else None
        state = LayerState(local[i], hot[target] if target >= 0 else None, observed)
        with jax.named_scope(f"layer{i}"):
            carry, state, brought = pieces.layer(inputs, state, carry)
        local[i] = state.local
        if target >= 0:
            hot[target] = state.hot
        if observed is not None:
            states[host_index] = state.observed
        if watch is not None:
            at = numbers[host_index] if host_index >= 0 else None
            selection = decoder.target(weights, read, states or read.states, host_index, at)
            read_arrays = inputs.place, selection, read.host, live.lengths
            watched = Watched(params, before, carry, local[i], *read_arrays)
            carry, record = watch(decoder, watched)
            records.append(record)
        if i + 1 < len(stored):  # `brought`: the next layer's parameters, if from host memory
            params = stored[i + 1] if brought is None else merged(stored[i + 1], brought)
    live = StepCache(tuple(local), tuple(hot), tuple(states), live.lengths)
    return carry.x, live, carry.counts, tuple(records)


def pieces_of(decoder: Decoder) -> Pieces:
    """Return the pieces of a decoder's step as plain functions."""

    def bring(params: Params, x: Float[Array, "b e"]) -> tuple[Params, Float[Array, "b e"]]:
        if not decoder.weights_on_host:
            return params, x
        brought, x = await_copy(*start_copy(params, x))
        return merged(params, brought), x

    def layer(
        inputs: LayerInputs, state: LayerState, carry: Carry
    ) -> tuple[Carry, LayerState, Any]:
        # The next layer's weights cross while this layer computes.
        upcoming, x = start_next(inputs.upcoming, carry.x)
        carry, state = decoder.decode_layer(inputs, state, carry._replace(x=x))
        upcoming, x = await_copy(upcoming, carry.x)
        return carry._replace(x=x), state, upcoming

    return Pieces(decoder.embed, bring, decoder.request_first, layer)


def trace_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Trace a function once for each kind of arguments; further calls repeat its operations.

    Unlike a nested `jax.jit`, whose operations all calls share, every call keeps its name scope, so
    that profiles tell the layers apart.
    """
    traces: dict[Any, tuple[Callable[..., Any], Any]] = {}

    def call(*arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        kind = structure, tuple(map(jax.typeof, leaves))
        if kind not in traces:
            jaxpr, results = jax.make_jaxpr(function, return_shape=True)(*arguments)
            traces[kind] = jaxpr_as_fun(jaxpr), jax.tree.structure(results)
        trace, results = traces[kind]
        return jax.tree.unflatten(results, trace(*leaves))

    return call


class Steps(NamedTuple):
    """Compiled functions of a Decoder; they donate the cache arrays that they replace.

    Attributes:
        fused: a whole step; returns logits of the next tokens and the most likely ones.
        checked: `fused`, with the first stage that is not finite (see `decode.finite_check`).
        pieces: programs of the layerwise schedule.
        predict: logits and most likely tokens, the last program of a layerwise step.
        flush: write one host layer's ring to the host.
        flush_pool: write the rings of a cache with a pool to the host.
    """

    fused: Any
    checked: Any
    pieces: Pieces
    predict: Any
    flush: Any
    flush_pool: Any


@functools.lru_cache(maxsize=64)
def steps(decoder: Decoder) -> Steps:
    """Return a decoder's compiled functions; engines with equal settings share them."""
    pieces = pieces_of(decoder)
    inner = pieces._replace(layer=trace_once(pieces.layer))

    def layers(
        weights: Weights,
        read: ReadCache,
        live: StepCache,
        tokens: Array,
        watch: Watch | None = None,
    ) -> Any:
        numbers = [jnp.int32(i) for i in range(decoder.host_layers)]
        return step(decoder, inner, numbers, weights, read, live, tokens, watch)

    def fused(weights: Weights, read: ReadCache, live: StepCache, tokens: Array) -> tuple:
        x, new, counts, _ = layers(weights, read, live, tokens)
        predicted = decoder.predict(weights.params["embedding"], x)
        return new._replace(lengths=live.lengths + 1), *predicted, counts

    def checked(weights: Weights, read: ReadCache, live: StepCache, tokens: Array) -> tuple:
        embedding, positions = weights.params["embedding"], live.lengths
        x, new, counts, finite = layers(weights, read, live, tokens, finite_after)
        logits, best = decoder.predict(embedding, x)
        ends = decoder.embed(embedding, tokens, positions).x, logits
        first, last = (jnp.all(jnp.isfinite(end), axis=-1) for end in ends)
        place = first_place((first, *finite, last), positions)
        return new._replace(lengths=positions + 1), logits, best, counts, place

    def predict(params: Params, x: Array, lengths: Array) -> tuple:
        return *decoder.predict(params, x), lengths + 1

    def flush_pool(policy: Any, cache: Cache) -> Cache:
        return pooled.flush(decoder, policy, cache)

    def program(function: Callable[..., Any], out: Any, **options: Any) -> Program:
        settings = {"out_shardings": out, "compiler_options": step_options(decoder)} | options
        return Program(function, decoder, **settings)

    at: Any = Placement(decoder.mesh)
    counts, live = Counts(at.batch, at.batch), StepCache(at.rows, at.rows, at.rows, at.batch)
    carry, state = Carry(at.batch, at.rows, counts), LayerState(at.rows, at.rows, at.rows)
    predicted = (live, at.batch, at.batch, counts)
    whole = Cache(at.host, at.rows, at.rows, at.batch, at.rows, at.rows, at.rows)
    bring = program(pieces.bring, (at.whole, at.batch)) if decoder.weights_on_host else pieces.bring
    return Steps(
        fused=program(fused, predicted, donate_argnums=2),
        checked=program(checked, (*predicted, at.batch), donate_argnums=2),
        pieces=Pieces(
            embed=program(pieces.embed, Carry(at.batch, None, counts)),
            bring=bring,
            first=program(pieces.first, (carry, at.rows), donate_argnums=1),
            # Fetched rows are not donated: no output could reuse their buffer.
            layer=program(pieces.layer, (carry, state, at.whole), donate_argnums=1),
        ),
        predict=program(predict, (at.batch,) * 3),
        flush=program(
            decoder.flush, (at.host, at.rows), donate_argnums=(2, 3), static_argnames="streams"
        ),
        flush_pool=program(flush_pool, whole, donate_argnums=1),
    )


def flush_cache(
    decoder: Decoder, weights: Weights, numbers: Sequence[Array], cache: Cache
) -> Cache:
    """Write the rows of all rings to the host, so that the host holds every cached row."""
    programs = steps(decoder)
    if cache.host is None:
        return cache
    if cache.pool:
        return programs.flush_pool(weights.policy, cache)
    host, states = cache.host, list(cache.states)
    for number, layer in enumerate(decoder.on_host):
        host, states[number] = programs.flush(
            weights.policy[number],
            numbers[number],
            host,
            states[number],
            cache.local[layer],
            cache.scales[number],
            cache.lengths,
            streams=decoder.streams(number),
        )
    return cache._replace(host=host, states=tuple(states))
