"""Where cached rows are: the ring of recent tokens, and the array in host memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime import copies

from infinigen_jax.cache.host_array import (
    allocate_host,
    default_mesh,
    gather_rows,
    read_block,
    store_rows,
    write_span,
)
from infinigen_jax.cache.layers import Resident, Slots
from infinigen_jax.ops.span import Span, put_span

SHAPE = (3, 2, 2, 40, 6)  # layers, sequences, KV heads, slots, row
MESH = default_mesh()

positions_of = jax.jit(Slots.positions, static_argnums=0)
eligible_at = jax.jit(Slots.eligible, static_argnums=(0, 2))
# Few, because each has shapes that must be compiled.
geometry = st.sampled_from([(0, 4), (2, 3), (5, 1), (4, 9)])


@settings(max_examples=40)
@given(geometry, st.lists(st.integers(0, 40), min_size=3, max_size=3))
def test_sinks_and_recent_tokens_are_resident_and_all_others_eligible(sizes, current):
    (sinks, window), slots = sizes, Slots(*sizes)
    now = jnp.array(current, jnp.int32)
    resident, eligible = positions_of(slots, now), eligible_at(slots, now, 48)
    for newest, in_slots, on_host in zip(current, resident.tolist(), eligible, strict=True):
        on_device = [p for p in range(newest + 1) if p < sinks or p > newest - window]
        assert len(in_slots) == slots.size and sorted(p for p in in_slots if p >= 0) == on_device
        others = np.setdiff1d(np.arange(newest + 1), on_device)
        np.testing.assert_array_equal(np.flatnonzero(on_host), others)


write_row = jax.jit(Resident.write, static_argnums=4)
extend = jax.jit(Resident.extend, static_argnums=3)
part_of = jax.jit(Resident.part, static_argnums=2)


@pytest.mark.parametrize("sinks, window, block", [(0, 1, 0), (2, 3, 0), (2, 4, 4), (4, 8, 4)])
def test_resident_rows_follow_the_tokens(sinks, window, block):
    """Each slot has the row of its position, and `left` the sums of the values only on the host."""
    slots, lengths, longest = Slots(sinks, window, block), np.array([1, 5, 12], np.int32), 12
    rows = np.arange(1, 41, dtype=np.float32)  # position p has values of p + 1, keys of -p - 1
    prompt = np.repeat([-rows[:longest], rows[:longest]], 2, axis=0).T
    prompt = jnp.asarray(np.broadcast_to(prompt, (3, 2, longest, 4)))
    resident = Resident.empty(3, 2, 2, slots, jnp.float32, slots.blocks(40))
    span = Span(jnp.zeros(len(lengths), jnp.int32), jnp.asarray(lengths))
    resident = extend(resident, prompt, span, slots)

    def check(current: np.ndarray) -> None:
        part = part_of(resident, jnp.asarray(current), slots)
        positions = np.asarray(positions_of(slots, current))
        np.testing.assert_array_equal(part.valid[:, 0], positions >= 0)
        for i, j in np.argwhere(positions >= 0):
            assert (np.asarray(part.keys)[i, :, j] == -rows[positions[i, j]]).all()
            assert (np.asarray(part.values)[i, :, j] == rows[positions[i, j]]).all()
        for i, newest in enumerate(current):
            gone = np.where(np.arange(40) <= newest - window, rows, 0)
            gone[:sinks] = 0
            blocks = gone.reshape(slots.blocks(40), -1).sum(axis=1)
            assert (np.asarray(resident.left)[i] == blocks[None, :, None]).all()

    check(lengths - 1)
    for step in range(2 * window + sinks):
        now = lengths + step
        value = jnp.broadcast_to(jnp.asarray(rows[now])[:, None, None], (3, 2, 2))
        resident = write_row(resident, -value, value, jnp.asarray(now), slots)
        check(now)
    start = jnp.asarray(now - window + 1)
    since = resident.since(start, slots)
    expected = rows[np.asarray(start)[:, None] + np.arange(window)]
    np.testing.assert_array_equal(since[:, 1, :, 2], expected)
    np.testing.assert_array_equal(since[:, 1, :, 1], -expected)


def test_a_token_is_written_to_the_ring_where_it_lies():
    """Although several operations read the row that it evicts."""
    slots, matrix = Slots(4, 16, 8), jnp.ones((2, 8, 8))
    local = Resident.empty(1, 2, 8, slots, jnp.float32, blocks=8)

    def summed(rows: jax.Array) -> jax.Array:
        keys, values = jnp.split(rows, 2, axis=-1)
        return values - jnp.einsum("bknd,kde->bkne", keys, matrix)

    def write(local: Resident, key: jax.Array, value: jax.Array, position: jax.Array) -> Resident:
        return local.write(key, value, position, slots, summed)

    new, at = jnp.ones((1, 2, 8)), jnp.array([3])
    program = jax.jit(write, donate_argnums=0).lower(local, new, 2 * new, at).compile()
    assert max(copies(program.as_text() or ""), default=0) < local.keys.size


write = jax.jit(functools.partial(write_span, mesh=MESH), donate_argnums=0)


def filled() -> tuple[jax.Array, np.ndarray]:
    """Return a host cache written layer by layer, and the same in NumPy."""
    expected = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    cache = allocate_host(SHAPE, jnp.float32, MESH)
    whole = Span.whole(SHAPE[1], SHAPE[3])
    for layer in range(SHAPE[0]):
        cache = write(cache, jnp.int32(layer), jnp.asarray(expected[layer]), whole)
    return cache, expected


spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 7)), min_size=2, max_size=2)


@given(spans)
def test_written_chunks_leave_everything_else(places):
    """Also at the very end, where a chunk with its padding does not fit."""
    starts = np.array([at for at, _ in places], np.int32)
    counts = np.minimum([n for _, n in places], SHAPE[3] - starts).astype(np.int32)
    cache, expected = filled()
    rows = np.random.default_rng(1).normal(size=(2, 2, 7, 6)).astype(np.float32)
    rows[:, :, -1] = np.nan if counts.max() < 7 else rows[:, :, -1]
    span = Span(jnp.asarray(starts), jnp.asarray(counts))
    cache = write(cache, jnp.int32(1), jnp.asarray(rows), span)
    on_device = put_span(jnp.asarray(expected[1]), jnp.asarray(rows), span, axis=2)
    for i, (start, count) in enumerate(zip(starts, counts, strict=True)):
        expected[1, i, :, start : start + count] = rows[i, :, :count]
    np.testing.assert_array_equal(jax.device_put(cache, jax.memory.Space.Device), expected)
    np.testing.assert_array_equal(on_device, expected[1])


def test_rows_and_blocks_that_are_read():
    cache, expected = filled()
    slots = np.random.default_rng(1).integers(0, SHAPE[3], (2, 2, 9)).astype(np.int32)
    slots[0, 0, :2], slots[1, 1, -2:] = 0, SHAPE[3] - 1
    gather = jax.jit(functools.partial(gather_rows, mesh=MESH))
    read = jax.jit(functools.partial(read_block, mesh=MESH, batch=2), static_argnames="size")
    for layer, start, size in ((0, 0, 40), (1, 8, 8), (2, 39, 1)):
        rows = gather(cache, jnp.int32(layer), jnp.asarray(slots))
        block = read(cache, jnp.int32(layer), jnp.int32(start), size=size)
        assert rows.sharding.memory_kind == block.sharding.memory_kind == "device"
        reference = np.take_along_axis(expected[layer], slots[..., None], axis=2)
        np.testing.assert_array_equal(rows, reference)
        np.testing.assert_array_equal(block, expected[layer][:, :, start : start + size])


def test_the_programs_hold_no_copy_of_a_layer():
    shape = (3, 2, 2, 4096, 16)
    cache = allocate_host(shape, jnp.float32, MESH)
    layer, slots = jnp.int32(1), jnp.zeros((3, 2, 2, 5), jnp.int32)
    donated = {
        store_rows: (jnp.ones((3, 2, 2, 5, 16)), slots),
        write_span: (layer, jnp.ones((2, 2, 9, 16)), Span.whole(2, 9)),
    }
    read = {
        gather_rows: (layer, jnp.zeros((2, 2, 9), jnp.int32)),
        functools.partial(read_block, size=64, batch=2): (layer, jnp.int32(3)),
    }
    for functions, donate in ((donated, (0,)), (read, ())):
        for function, arguments in functions.items():
            program = jax.jit(functools.partial(function, mesh=MESH), donate_argnums=donate)
            hlo = program.lower(cache, *arguments).compile().as_text() or ""
            assert max(copies(hlo), default=0) < np.prod(shape[1:]), function
            if donate:
                assert "input_output_alias" in hlo
    program = jax.jit(functools.partial(write_span, mesh=MESH)).lower(cache, *donated[write_span])
    copied = copies(program.compile().as_text() or "")  # of the whole cache, as it is not donated
    assert max(copied) >= np.prod(shape[1:])
