"""XLA's programs for a cache in pinned host memory: the smallest ones that show it.

These hold the facts that the package rests on, one operation at a time, and at the same time check
`compile_for_gpu` itself: that it finds the copies it is there to find.
"""

import jax
import jax.numpy as jnp
import pytest
from compile_for_gpu import compile_for_gpu, on_device, on_host
from jax import lax
from placeholders import register_placeholder
from reading import (
    assert_no_copy_larger_than,
    assert_updated_in_place,
    async_pairs,
    between_custom_calls,
    copies,
    host_copies,
    large_results,
)

LAYERS, BATCH, HEADS, CAPACITY, ROW = 2, 3, 4, 1024, 256
FETCHED = 32
CACHE_SHAPE = (LAYERS, BATCH, HEADS, CAPACITY, ROW)
CACHE_BYTES = LAYERS * BATCH * HEADS * CAPACITY * ROW * 2
LAYER_BYTES = CACHE_BYTES // LAYERS
FETCHED_BYTES = BATCH * HEADS * FETCHED * ROW * 2


def to_host(x):
    return jax.device_put(x, jax.memory.Space.Host)


def to_device(x):
    return jax.device_put(x, jax.memory.Space.Device)


def gather_rows(cache, layer, slots):
    """Rows [b, k, n, row] of a layer, on the device, from a cache [layers, b, k, t, row]."""
    sequence = lax.broadcasted_iota(jnp.int32, slots.shape, 0)
    head = lax.broadcasted_iota(jnp.int32, slots.shape, 1)
    indices = jnp.stack([jnp.broadcast_to(layer, slots.shape), sequence, head, slots], axis=-1)
    dimensions = lax.GatherDimensionNumbers(
        offset_dims=(3,), collapsed_slice_dims=(0, 1, 2, 3), start_index_map=(0, 1, 2, 3)
    )
    one_row = (1, 1, 1, 1, cache.shape[-1])
    rows = lax.gather(cache, to_host(indices), dimensions, one_row, mode="promise_in_bounds")
    return lax.optimization_barrier(to_device(rows))


def append_rows(cache, rows, positions):
    """Write rows [layers, b, k, n, row] at positions [b]."""
    for sequence in range(cache.shape[1]):
        one = to_host(lax.slice_in_dim(rows, sequence, sequence + 1, axis=1))
        cache = lax.dynamic_update_slice(cache, one, (0, sequence, 0, positions[sequence], 0))
    return cache


@pytest.fixture
def cache():
    return on_host(CACHE_SHAPE)


@pytest.fixture
def gather_arguments(cache):
    return cache, on_device((), jnp.int32), on_device((BATCH, HEADS, FETCHED), jnp.int32)


def test_allocating_takes_no_temporary():
    program = compile_for_gpu(lambda: to_host(lax.empty(CACHE_SHAPE, jnp.bfloat16)))
    assert program.memory["host_output"] == CACHE_BYTES
    assert program.memory["temp"] == program.memory["host_temp"] == 0
    assert not copies(program)


def test_allocating_zeros_fills_device_memory_first():
    """Why the cache comes from `lax.empty`."""
    program = compile_for_gpu(lambda: to_host(jnp.zeros(CACHE_SHAPE, jnp.bfloat16)))
    assert program.memory["temp"] >= CACHE_BYTES


def test_appending_is_in_place(cache):
    rows = on_device((LAYERS, BATCH, HEADS, 1, ROW))
    positions = on_device((BATCH,), jnp.int32)
    program = compile_for_gpu(append_rows, cache, rows, positions, donate_argnums=0)
    assert_updated_in_place(program, CACHE_BYTES)
    assert_no_copy_larger_than(program, rows.size * 2)
    assert not large_results(program, LAYER_BYTES)


def test_appending_without_donation_is_found_out(cache):
    rows = on_device((LAYERS, BATCH, HEADS, 1, ROW))
    program = compile_for_gpu(append_rows, cache, rows, on_device((BATCH,), jnp.int32))
    with pytest.raises(AssertionError, match="aliased"):
        assert_updated_in_place(program, CACHE_BYTES)
    with pytest.raises(AssertionError, match="copies of more than"):
        assert_no_copy_larger_than(program, LAYER_BYTES)


def test_gathering_moves_only_the_rows(gather_arguments):
    program = compile_for_gpu(gather_rows, *gather_arguments)
    assert_no_copy_larger_than(program, FETCHED_BYTES)
    assert not large_results(program, LAYER_BYTES)
    assert [copy.nbytes for copy in host_copies(program, FETCHED_BYTES)] == [FETCHED_BYTES]
    assert program.memory["host_temp"] == FETCHED_BYTES


def test_gathering_on_the_device_copies_the_cache(gather_arguments):
    """The helper sees the cost of a careless gather."""
    cache, _, slots = gather_arguments
    program = compile_for_gpu(
        lambda cache, slots: jnp.take_along_axis(to_device(cache[0]), slots[..., None], axis=2),
        cache,
        slots,
    )
    assert large_results(program, LAYER_BYTES)


def test_transfer_overlaps_with_independent_work(gather_arguments):
    def step(cache, layer, slots, x):
        rows = gather_rows(cache, layer, slots)
        for _ in range(3):
            x = jnp.tanh(x @ x)
        return rows @ x

    program = compile_for_gpu(step, *gather_arguments, on_device((ROW, ROW)))
    transfers = [pair for pair in async_pairs(program) if pair.start.nbytes == FETCHED_BYTES]
    assert [len(pair.between) > 0 for pair in transfers] == [True]


def test_custom_calls_take_the_cache_as_it_is(gather_arguments):
    """A start and a wait of our own, with the work that barriers put between them."""
    register_placeholder("test_rows_start", "test_rows_wait")
    rows = jax.ShapeDtypeStruct((BATCH, HEADS, FETCHED, ROW), jnp.bfloat16)

    def step(cache, layer, slots, x):
        ticket = jax.ffi.ffi_call("test_rows_start", rows)(cache, layer, slots)
        x, ticket = lax.optimization_barrier((x, ticket))
        y = jnp.tanh(x @ x)
        y, ticket = lax.optimization_barrier((y, ticket))
        wait = jax.ffi.ffi_call("test_rows_wait", rows, input_output_aliases={0: 0})
        return wait(ticket, cache, slots), y

    program = compile_for_gpu(step, *gather_arguments, on_device((ROW, ROW)))
    assert not copies(program)
    assert between_custom_calls(program, "test_rows_start", "test_rows_wait")
