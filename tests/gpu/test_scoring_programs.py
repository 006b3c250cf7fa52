"""Scoring the index, in programs compiled for a GPU: LLaMA-3-8B, 8 sequences of 16384 tokens.

Of a layer: the index has 55 MB, its scores 17 MB, and its codes would have 403 MB in float32.
"""

import dataclasses
import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
import step_programs as sp
from compile_for_gpu import Program, compile_for_gpu, on_device
from reading import computations, launched

from infinigen_jax import InfiniGen, cuda
from infinigen_jax.cache.cache import HostLayer
from infinigen_jax.cache.host_array import default_mesh
from infinigen_jax.cache.layers import Resident
from infinigen_jax.cuda.launch import TARGET
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.decode.layer_rows import HostRows
from infinigen_jax.selection.select import Request
from infinigen_jax.transfer import Transfer

B, K, G, D, T = 8, 8, 4, 128, 16384
POLICY = InfiniGen()
SCORES_BYTES = 4 * B * K * G * T
COLUMNS = POLICY.index_format(D).columns
INDEX = jax.eval_shape(lambda: POLICY.index_format(D).empty(B, K, T))


def array(*shape: int, dtype: Any = sp.DTYPE) -> Any:
    """Return the shape of an array on the device."""
    return on_device(shape, dtype)


@functools.cache
def speculated(kernels: bool) -> Program:
    """Scores by the query of the layer before."""

    def scores(query: Any, index: Any) -> Any:
        return POLICY.index_format(D).scores(query, index)

    with mock.patch.object(cuda, "in_use", lambda: kernels):
        query = array(B, K, G, COLUMNS, dtype=jnp.float32)
        return compile_for_gpu(scores, query, array(*INDEX.shape, dtype=INDEX.dtype))


@functools.cache
def tail(kernels: bool) -> Program:
    """Scores of the tail in blocks, by the layer's own query."""
    heads = {"num_heads": K * G, "num_kv_heads": K, "head_dim": D, "max_positions": T}
    config = dataclasses.replace(sp.CONFIG, **heads)
    decoder = Decoder(config, sp.DTYPE, POLICY, Transfer(), 0, default_mesh())

    def scores(q: Any, weights: Any, index: Any, request: Request, local: Resident, at: Any):
        own = HostLayer(jnp.int32(0), (), weights, index)
        rows = HostRows(decoder, local, at, None, jnp.zeros((1, 1, K, T, 2 * D), sp.DTYPE), own)
        tail = rows.tail_term(q, request, None)
        assert tail is not None
        return tail.score, tail.shift

    real, whole = (functools.partial(array, dtype=dtype) for dtype in (jnp.float32, jnp.int32))
    weights = {"own": real(K, COLUMNS, D), "slope": real(K, POLICY.tail_columns, D)}
    weights |= {"mean": real(K, D), "centre": real(K, COLUMNS)}
    index = array(*INDEX.shape, dtype=INDEX.dtype)
    request = Request(whole(B, K, POLICY.request_size(T)), whole(B, K))
    sums = real(B, K, T // POLICY.tail_block, D)
    local = Resident(*(array(B, K, decoder.slots.size, D) for _ in range(2)), left=sums)
    with mock.patch.object(cuda, "in_use", lambda: kernels):
        given = (array(B, K, G, D), weights, index, request, local, whole(B))
        return compile_for_gpu(scores, *given)


def test_speculation_is_one_launch():
    (launch,) = launched(speculated(True))
    assert launch.target == TARGET and launch.nbytes == SCORES_BYTES


def test_the_tail_reads_the_index_once_and_stores_no_scores():
    program = tail(True)
    work = launched(program)
    assert len(work) <= 8 and sum(i.target == TARGET for i in work) == 1
    everything = [i for body in computations(program.hlo).values() for i in body]
    (index,) = (i.name for i in everything if [r.shape for r in i.results] == [INDEX.shape])
    assert [i.target for i in everything if index in i.operands] == [TARGET]
    # A block's score, and the mean entry of its remaining rows.
    of_blocks = SCORES_BYTES // POLICY.tail_block * (1 + POLICY.tail_columns)
    assert max(i.nbytes for i in work) <= of_blocks
    assert program.memory["temp"] < 2 * of_blocks


@pytest.mark.parametrize("made", [speculated, tail])
def test_without_kernels_codes_are_not_written_out(made: Any):
    """XLA stores the scores, and each token's step and lowest value, but no unpacked code."""
    largest = max(i.nbytes for i in launched(made(False)))
    assert SCORES_BYTES <= largest < 1.001 * SCORES_BYTES
