"""Decode step as a loop over layers, compiled for the two schedules.

`layerwise` runs the loop in Python over groups of layers. Groups of one kind and size share a
program, so compilation time is independent of the number of layers. `fused` compiles the whole
loop: one call per token, compiled again for each number of layers. Both run the same `step` and
give equal results.

The loop is unrolled, not scanned: a scan over stacked weights copies every weight once per token
(docs/architecture.md).
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from infinigen_jax.cache.cache import Cache, HostLayer, ReadCache, StepCache, cache_shardings
from infinigen_jax.cache.host_array import Placement
from infinigen_jax.cache.layers import Local
from infinigen_jax.cache.pool import Hot
from infinigen_jax.decode.compiled import compiled
from infinigen_jax.decode.compiler_options import chunk_options, step_options
from infinigen_jax.decode.finite_check import finite_after, first_place
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.decode.state import Carry, Counts, LayerInputs, LayerState, Target, Weights
from infinigen_jax.models import Params
from infinigen_jax.programs.program import Program
from infinigen_jax.selection.select import Request
from infinigen_jax.transfer.host_weights import (
    await_copy,
    in_host_memory,
    merged,
    start_copy,
    start_next,
)

# Layers of a group. On a CPU, single layers made a step of SmolLM2-135M up to an eighth longer, and
# four no shorter, but their program took twice the memory and the time to load.
GROUP = 2


class Watched(NamedTuple):
    """One layer of a step with its inputs and outputs, for a `Watch` function.

    Attributes:
        params: parameters of the layer.
        before, after: what the layer got from the one before, and passes on: the hidden state `x`
            and the rows that were fetched for the layer, `fetched`.
        local: rows of the layer on the device, including the current token's.
        place: where the host keeps its rows, at index `place.number`; None for a layer on the
            device. `cache.host_array.read_block` reads rows from `host`.
        selection: what the layer's rows are selected with; None if it selects none.
        host: [l, a, k, t, w], rows of all layers on the host; None if there are none.
        positions: [b], position of the current token of each sequence.
    """

    params: Params
    before: Carry
    after: Carry
    local: Local
    place: HostLayer | None
    selection: Target | None
    host: Array | None
    positions: Array

    def request(self, decoder: Decoder, capacity: int) -> Request:
        """Return the layer's request; one made by its own query is computed again."""
        if self.before.fetched is not None:
            return self.before.fetched.request
        assert self.selection is not None
        a = decoder.blueprint.layer(self.params).attention_input(self.before.x)
        return decoder.select(self.selection, a, self.positions, capacity)


# Map a layer to the carry for the next one (normally `after`) and a record [b, ...].
Watch = Callable[[Decoder, Watched], tuple[Carry, Any]]


class Pieces(NamedTuple):
    """Functions that make up a step: traced into one program, or compiled one by one."""

    embed: Callable[..., Any]  # (params, tokens, positions) -> carry into the first layer
    bring: Callable[..., Any]  # (parameters in host memory, x) -> their copies on the device, and x
    first: Callable[..., Any]  # `Decoder.request_first`
    # (inputs, states, carry) -> carry, states, and the next layer's parameters if they are in host
    # memory. Inputs and states are lists, with an item for each layer of a group.
    layers: Callable[..., Any]
    groups: tuple[range, ...]  # the layers of each call of `layers`, in order


class Arrays:
    """Arrays of a step in progress; `hot` and `states` by host layer, others by model layer."""

    def __init__(
        self, decoder: Decoder, numbers: Any, weights: Weights, read: ReadCache, live: StepCache
    ):
        self._decoder, self._numbers, self._weights, self._read = decoder, numbers, weights, read
        self._local, self._hot, self._states = list(live.local), list(live.hot), list(live.states)
        self._lengths = live.lengths
        self.stored = weights.params["layers"]  # on the device or in host memory

    def inputs(self, layer: int, params: Params) -> LayerInputs:
        """Return what a layer reads."""
        decoder = self._decoder
        upcoming = self.stored[layer + 1 : layer + 2] if decoder.weights_on_host else []
        # `place` describes a layer that selects by its own query.
        target = self._target(decoder.fetches_for(layer) if decoder.policy.lead else -1)
        place = self._place(decoder.host_number(layer))
        return LayerInputs(params, upcoming, self._read.host, place, target, self._lengths)

    def state(self, layer: int) -> LayerState:
        """Return what a layer replaces."""
        number, target = self._decoder.host_number(layer), self._decoder.fetches_for(layer)
        observed = self._states[number] if number >= 0 and self._states else None
        hot = self._hot[target] if target >= 0 else Hot()
        return LayerState(self._local[layer], hot, observed)

    def keep(self, layer: int, state: LayerState) -> None:
        """Store what a layer replaced."""
        self._local[layer], target = state.local, self._decoder.fetches_for(layer)
        if target >= 0:
            self._hot[target] = state.hot
        if state.observed is not None:
            self._states[self._decoder.host_number(layer)] = state.observed

    def request_first(self, first: Callable[..., Any], params: Params, carry: Carry) -> Carry:
        """Request the rows of layer 0 with the piece `first`."""
        inputs = self.inputs(0, params)._replace(upcoming=[], target=self._target(0))
        carry, self._hot[0] = first(inputs, self._hot[0], carry)
        return carry

    def watched(self, layer: int, inputs: LayerInputs, before: Carry, after: Carry) -> Watched:
        selection = self._target(self._decoder.host_number(layer))
        read_arrays = inputs.place, selection, self._read.host, self._lengths
        return Watched(inputs.params, before, after, self._local[layer], *read_arrays)

    @property
    def live(self) -> StepCache:
        return StepCache(tuple(self._local), tuple(self._hot), tuple(self._states), self._lengths)

    def _place(self, number: int) -> HostLayer | None:
        """Return where the host keeps the rows of its layer `number`; None if that is -1."""
        if number < 0:
            return None
        decoder, read = self._decoder, self._read
        weights = state = None
        if not decoder.streams(number):
            weights = self._weights.policy[number]
            state = read.states[number] if read.states else None
        numbered = self._numbers[number], read.scales[number]
        return HostLayer(*numbered, weights, state, read.pool_of(number))

    def _target(self, number: int) -> Target | None:
        """Return host layer `number` as a target of selection; None if it selects no rows."""
        if number < 0 or self._decoder.streams(number):
            return None
        params, read = self.stored[self._decoder.on_host[number]], self._read
        arrays = self._weights.policy[number], (self._states or read.states)[number]
        return Target(params, *arrays, self._numbers[number], read.pool_of(number))


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

    `numbers` are the indices of the host layers, as device scalars. `watch`, if any, is called
    after every layer; each group is then a single layer. Return the last layer's output, the new
    cache arrays with `lengths` unchanged, the rows selected and moved, and the records of `watch`.
    """
    arrays, records = Arrays(decoder, numbers, weights, read, live), []
    carry = pieces.embed(weights.params["embedding"], tokens, live.lengths)
    params = arrays.stored[0]
    if decoder.weights_on_host:
        brought, x = pieces.bring(in_host_memory(params), carry.x)
        params, carry = merged(params, brought), carry._replace(x=x)
    if decoder.fetches_for(-1) >= 0:
        carry = arrays.request_first(pieces.first, params, carry)
    for group in pieces.groups:
        of_layers, before = [params, *arrays.stored[group.start + 1 : group.stop]], carry
        inputs = [arrays.inputs(i, params) for i, params in zip(group, of_layers, strict=True)]
        states = [arrays.state(i) for i in group]
        with jax.named_scope(f"layer{group.start}"):
            carry, states, brought = pieces.layers(inputs, states, carry)
        for i, state in zip(group, states, strict=True):
            arrays.keep(i, state)
        if watch is not None:
            carry, record = watch(decoder, arrays.watched(group.start, inputs[0], before, carry))
            records.append(record)
        if group.stop < len(arrays.stored):
            params = merged(arrays.stored[group.stop], brought)
    return carry.x, arrays.live, carry.counts, tuple(records)


@compiled(lambda at: (at.whole, at.batch), chunk_options, donate_argnums=1)
def bring(
    decoder: Decoder, params: Any, x: Float[Array, "*b e"]
) -> tuple[Any, Float[Array, "*b e"]]:
    """Copy a layer's host parameters to the device, after the computation of x."""
    return await_copy(*start_copy(params, x))


def pieces_of(decoder: Decoder) -> Pieces:
    """Return the pieces of a decoder's step as plain functions."""

    def layer(
        inputs: LayerInputs, state: LayerState, carry: Carry
    ) -> tuple[Carry, LayerState, Any]:
        # The next layer's weights cross while this layer computes.
        upcoming, x = start_next(inputs.upcoming, carry.x)
        carry, state = decoder.decode_layer(inputs, state, carry._replace(x=x))
        upcoming, x = await_copy(upcoming, carry.x)
        return carry._replace(x=x), state, upcoming

    # Traced once for each kind of layer. Inlined, every call keeps its scope in profiles.
    of_a_kind = jax.jit(layer, inline=True)

    def layers(
        inputs: list[LayerInputs], states: list[LayerState], carry: Carry
    ) -> tuple[Carry, list[LayerState], Any]:
        new, upcoming = [], None
        for of_layer, state in zip(inputs, states, strict=True):
            carry, state, upcoming = of_a_kind(of_layer, state, carry)
            new.append(state)
        return carry, new, upcoming

    plain = functools.partial(bring.__wrapped__, decoder)
    return Pieces(decoder.embed, plain, decoder.request_first, layers, single_layers(decoder))


def single_layers(decoder: Decoder) -> tuple[range, ...]:
    """Return a group for each layer."""
    return tuple(range(i, i + 1) for i in range(decoder.config.num_layers))


def groups_of(decoder: Decoder) -> tuple[range, ...]:
    """Return the groups of the layerwise schedule: consecutive layers of one kind each."""
    if decoder.weights_on_host or decoder.policy.observes:
        # The next layer's weights are results of the layer before, and a state that one layer reads
        # as its target's is donated as the next one's own.
        return single_layers(decoder)

    def kind(layer: int) -> tuple[Any, ...]:
        number, window = decoder.host_number(layer), decoder.config.window_of(layer)
        streams = number >= 0 and decoder.streams(number)
        return number >= 0, streams, window, decoder.fetches_for(layer) >= 0

    groups = []
    for _, run in itertools.groupby(range(decoder.config.num_layers), kind):
        first, *others = run
        layers = range(first, first + 1 + len(others))
        groups += [layers[i : i + GROUP] for i in range(0, len(layers), GROUP)]
    return tuple(groups)


class Steps(NamedTuple):
    """Compiled functions of a Decoder; they donate the cache arrays that they replace."""

    fused: Any  # a whole step: the arrays it replaces, logits, most likely tokens, and counts
    checked: Any  # `fused`, with the first stage that is not finite, see `decode.finite_check`
    pieces: Pieces  # of the layerwise schedule
    predict: Any  # logits and most likely tokens, the last program of a layerwise step
    flush: Any  # of one host layer's ring to the host
    flush_pool: Any  # of the rings of a cache with a pool


@functools.lru_cache(maxsize=64)
def steps(decoder: Decoder) -> Steps:
    """Return a decoder's compiled functions; engines with equal settings share them."""
    pieces = pieces_of(decoder)

    def fused(
        weights: Weights, read: ReadCache, live: StepCache, tokens: Array, check: bool = False
    ) -> tuple:
        numbers = [jnp.int32(i) for i in range(decoder.host_layers)]
        embedding, positions = weights.params["embedding"], live.lengths
        given = decoder, pieces, numbers, weights, read, live, tokens
        x, new, counts, finite = step(*given, finite_after if check else None)
        logits, best = decoder.predict(embedding, x)
        results = new._replace(lengths=positions + 1), logits, best, counts
        if not check:
            return results
        ends = decoder.embed(embedding, tokens, positions).x, logits
        first, last = (jnp.all(jnp.isfinite(end), axis=-1) for end in ends)
        return *results, first_place((first, *finite, last), positions)

    def predict(params: Params, x: Array, lengths: Array) -> tuple:
        return *decoder.predict(params, x), lengths + 1

    def program(function: Callable[..., Any], out: Any, **options: Any) -> Program:
        return Program(function, decoder, out, compiler_options=step_options(decoder), **options)

    checked = functools.partial(fused, check=True)
    at: Any = Placement(decoder.mesh)
    counts, live = Counts(at.batch, at.batch), StepCache(at.rows, at.rows, at.rows, at.batch)
    carry = Carry(at.batch, at.rows, counts)
    predicted = (live, at.batch, at.batch, counts)
    made = Steps(
        fused=program(fused, predicted, donate_argnums=2),
        checked=program(checked, (*predicted, at.batch), donate_argnums=2),
        pieces=Pieces(
            embed=program(pieces.embed, Carry(at.batch, None, counts)),
            bring=functools.partial(bring, decoder),
            first=program(pieces.first, (carry, at.rows), donate_argnums=1),
            # Fetched rows are not donated: no output could reuse their buffer.
            layers=program(pieces.layers, (carry, at.rows, at.whole), donate_argnums=1),
            groups=groups_of(decoder),
        ),
        predict=program(predict, (at.batch,) * 3),
        flush=program(
            decoder.flush, (at.host, at.rows), donate_argnums=(2, 3), static_argnames="streams"
        ),
        flush_pool=program(decoder.flush_pool, cache_shardings(at), donate_argnums=1),
    )
    if not decoder.exceeded:
        return made
    # The other programs are the same, and prompts use them as well.
    shared = steps(dataclasses.replace(decoder, exceeded=0))
    own = shared.pieces._replace(first=made.pieces.first, layers=made.pieces.layers)
    return shared._replace(fused=made.fused, checked=made.checked, pieces=own)


@functools.lru_cache(maxsize=64)
def host_numbers(decoder: Decoder) -> tuple[Int[Array, ""], ...]:
    """Return the indices of the host layers, as device scalars."""
    whole = Placement(decoder.mesh).whole
    return tuple(jax.device_put(np.int32(i), whole) for i in range(decoder.host_layers))


def flush_cache(decoder: Decoder, weights: Weights, cache: Cache) -> Cache:
    """Write the rows of all rings to the host, which then holds every row, or a pool's choice."""
    programs, numbers = steps(decoder), host_numbers(decoder)
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
