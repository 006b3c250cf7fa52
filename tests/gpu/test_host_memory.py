"""A cache in pinned host memory: how it is allocated, and careless programs. Small weights."""

import functools

import jax
import jax.numpy as jnp
import pytest
from compile_for_gpu import compile_for_gpu, on_device, on_host
from jax import lax
from reading import assert_no_copy_larger_than, assert_updated_in_place, copies, large_results
from runtime import engine

from infinigen_jax.cache.host_array import Placement, _allocation, default_mesh, to_host
from infinigen_jax.decode.layer_rows import STREAM_BLOCK
from infinigen_jax.engine.batch import copy_slots
from infinigen_jax.models.small_weights import AT_ONCE, FEW_ROWS, decoded_size, product, shrink_part
from infinigen_jax.settings.engine import WEIGHT_DTYPES

LAYERS, BATCH, HEADS, CAPACITY, ROW = 2, 3, 4, 1024, 256
SHAPE = (LAYERS, BATCH, HEADS, CAPACITY, ROW)
LAYER_BYTES = BATCH * HEADS * CAPACITY * ROW * 2
CACHE_BYTES = LAYERS * LAYER_BYTES


def test_allocating_takes_no_temporary():
    program = compile_for_gpu(_allocation(SHAPE, jnp.dtype(jnp.bfloat16), default_mesh()))
    assert program.memory["host_output"] == CACHE_BYTES
    assert program.memory["temp"] == program.memory["host_temp"] == 0
    assert not copies(program)


@pytest.mark.parametrize("layers", [1, LAYERS])
def test_a_sequence_is_copied_into_a_batch_block_by_block(layers):
    """This happens when a prompt joins a batch, and for a shared prefix."""
    at, block = Placement(default_mesh()), HEADS * STREAM_BLOCK * ROW * 2
    copy = functools.partial(copy_slots, engine("one").decoder)
    shapes = ((layers, sequences, *SHAPE[2:]) for sequences in (BATCH, 1))
    host, one = (jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=at.host) for shape in shapes)
    number = jax.ShapeDtypeStruct((), jnp.int32, sharding=at.whole)
    jitted = jax.jit(copy, donate_argnums=0, out_shardings=at.host)
    program = compile_for_gpu(jitted, host, number, one, *[number] * 3)
    assert_updated_in_place(program, layers * LAYER_BYTES)
    assert_no_copy_larger_than(program, block)


def test_appending_without_donation_is_found_out():
    def append(cache, row):
        return lax.dynamic_update_slice(cache, to_host(row), (0, 0, 0, 7, 0))

    rows = on_device((LAYERS, BATCH, HEADS, 1, ROW))
    program = compile_for_gpu(append, on_host(SHAPE), rows)
    with pytest.raises(AssertionError, match="aliased"):
        assert_updated_in_place(program, CACHE_BYTES)
    with pytest.raises(AssertionError, match="copies of more than"):
        assert_no_copy_larger_than(program, LAYER_BYTES)


def test_gathering_on_the_device_copies_the_cache():
    def gather(cache, slots):
        layer = jax.device_put(cache[0], jax.memory.Space.Device)
        return jnp.take_along_axis(layer, slots[..., None], axis=2)

    program = compile_for_gpu(gather, on_host(SHAPE), on_device((BATCH, HEADS, 32), jnp.int32))
    assert large_results(program, LAYER_BYTES)


MATRIX = (8192, 2048)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_decoded_matrix_takes_the_planned_memory(dtype: str):
    part = jax.eval_shape(lambda: shrink_part({"weight": jnp.zeros(MATRIX, jnp.bfloat16)}, dtype))
    part = {name: on_device(x.shape, x.dtype) for name, x in part.items()}
    assert decoded_size({"head": part}, FEW_ROWS) == 0
    rows = 2 * FEW_ROWS
    program = compile_for_gpu(product, on_device((rows, MATRIX[1])), part)
    planned = 2 * decoded_size({"head": part}, rows)
    assert planned == 2 * MATRIX[0] * MATRIX[1]
    workspace = 8 * 2**20  # of the library of matrix products
    assert 0.9 * planned < program.memory["temp"] < planned + workspace


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
def test_making_a_matrix_small_takes_little_memory(dtype: str):
    matrix = on_device((50257, 2048))  # of no equal pieces
    program = compile_for_gpu(shrink_part, {"weight": matrix}, keywords={"dtype": dtype})
    assert program.memory["temp"] < 6 * AT_ONCE
