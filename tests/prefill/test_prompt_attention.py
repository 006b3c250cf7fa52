"""Attention of chunks and of a few tokens, against NumPy in float64; also in long contexts."""

import functools
from collections.abc import Iterable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from runtime import SPARSE, engine, slow
from scipy.special import softmax
from test_fused_attention import stand_in
from tiny import normal

from benchmarks.prefill import temporaries
from infinigen_jax.cache.host_array import allocate_host, gather_rows, write_span
from infinigen_jax.cache.layers import Sliding
from infinigen_jax.ops.span import Span
from infinigen_jax.prefill import attention as prompt_attention
from infinigen_jax.prefill import cudnn_attention
from infinigen_jax.prefill.attention import attend_chunk, attention_mass
from infinigen_jax.prefill.compiled import device_rows, host_rows
from infinigen_jax.prefill.narrow_attention import Seen, attend_narrow
from infinigen_jax.prefill.prior_rows import ChunkAttention, PriorRows

TOLERANCE = 4e-6  # float32, sums over at most some hundred terms of size 1


def prompts(b: int, s: int, h: int, k: int, d: int = 8) -> Any:
    """Queries, keys and values."""
    heads = enumerate((h, k, k))
    return tuple(jnp.asarray(normal(b, s, n, d, seed=s + i)) for i, n in heads)


def weights_of(q: Any, keys: Any, window: int = 10**6) -> tuple[np.ndarray, np.ndarray]:
    """Causal attention weights [b, k, g, s, s], and the logarithms of their sums."""
    b, s, h, d = q.shape
    k = keys.shape[2]
    q, keys = np.asarray(q, np.float64), np.asarray(keys, np.float64)
    grouped = q.reshape(b, s, k, h // k, d)
    scores = np.einsum("bqkgd,bnkd->bkgqn", grouped, keys)
    visible = np.tri(s, dtype=bool) & ~np.tri(s, k=-window, dtype=bool)
    scores = np.where(visible, scores, -np.inf)
    log_sum = np.logaddexp.reduce(scores, axis=-1)
    return np.exp(scores - log_sum[..., None]), log_sum


def dense(q: Any, keys: Any, values: Any, window: int = 10**6) -> tuple[np.ndarray, np.ndarray]:
    """Causal attention in float64, with its weights' log-sums."""
    weights, log_sum = weights_of(q, keys, window)
    output = np.einsum("bkgqn,bnkd->bqkgd", weights, values).reshape(q.shape)
    return output, log_sum.transpose(0, 3, 1, 2).reshape(q.shape[:3])


def assert_close(got: ChunkAttention, expected: Iterable[Any]) -> None:
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=TOLERANCE)


@pytest.fixture(scope="module", params=["one by one", "together", "by cuDNN"])
def attend(request: Any) -> Any:
    """Return `attend_chunk` in small blocks: a CPU's way, an accelerator's, and cuDNN's."""

    def run(q: Any, keys: Any, values: Any, earlier: Any = None, window: Any = None) -> Any:
        if request.param == "by cuDNN":
            with mock.patch.object(cudnn, "dot_product_attention", stand_in):
                return cudnn_attention.attend(earlier, window, q, keys, values)
        settings = earlier, window, None, request.param == "together"
        with mock.patch.multiple(prompt_attention, DIAGONAL_BLOCK=7, CPU_TILE=10):
            return prompt_attention._attend(*settings, q, keys, values)

    return run


@pytest.mark.parametrize("h, k, s", [(6, 2, 1), (4, 1, 33)])
def test_causal_attention(h, k, s, attend):
    chunk = prompts(2, s, h, k)
    assert_close(jax.jit(attend)(*chunk), dense(*chunk))


@pytest.mark.parametrize("window", [1, 13])
def test_windows(window, attend):
    """A chunk alone, after a ring that holds the window before it, and after all rows."""
    whole, starts = prompts(2, 40, 4, 2), [20, 3]
    chunk: Any = [cut(x, starts, 11) for x in whole]
    expected: Any = dense(*whole, window=window)
    assert_close(jax.jit(functools.partial(attend, window=window))(*whole), expected)
    ring = Sliding(*jnp.zeros((2, 2, 2, window, 8), jnp.float32))
    rows = jnp.concatenate(whole[1:], axis=-1).swapaxes(1, 2)
    before = Span(jnp.zeros(len(starts), jnp.int32), jnp.array(starts, jnp.int32))
    span = Span(before.end, before.count)
    in_ring = device_rows(ring.extend(rows, before), span, jnp.float32)
    in_ring = in_ring._replace(size=min(4, window))
    for earlier in (in_ring, earlier_rows(stored(whole[1], whole[2], 45), 8, starts)):
        got = jax.jit(functools.partial(attend, earlier=earlier, window=window))(*chunk)
        assert_close(got, [cut(x, starts, 11) for x in expected])


def test_blocks_of_their_true_size():
    chunk = prompts(1, 600, 4, 2)
    assert_close(jax.jit(attend_chunk)(*chunk), dense(*chunk))


def test_half_precision_keeps_its_type_and_a_float32_softmax():
    chunk: Any = [jnp.asarray(x, jnp.bfloat16) for x in prompts(2, 40, 4, 2)]
    output = jax.jit(attend_chunk)(*chunk).output
    assert output.dtype == jnp.bfloat16
    exact: Any = [np.asarray(x, np.float32) for x in chunk]
    # The rounding of the weights and of the output, relative 2^-9 each, of values up to about 3.
    expected = dense(*exact)[0]
    np.testing.assert_allclose(output.astype(jnp.float32), expected, atol=3 * 2**-8)


def cut(x: Any, starts: list[int], size: int) -> Any:
    """`size` tokens of each sequence."""
    return jnp.stack([row[start : start + size] for row, start in zip(x, starts, strict=True)])


def stored(keys: Any, values: Any, capacity: int) -> list[jax.Array]:
    """[b, k, t, d], NaN after the rows."""
    shape = ((0, 0), (0, 0), (0, capacity - keys.shape[1]), (0, 0))
    return [
        jnp.asarray(np.pad(np.asarray(x).swapaxes(1, 2), shape, constant_values=np.nan))
        for x in (keys, values)
    ]


def earlier_rows(tables: list[jax.Array], size: int, starts: Any) -> PriorRows:
    def read(at: jax.Array, size: int) -> tuple[Any, Any]:
        keys, values = (jax.lax.dynamic_slice_in_dim(x, at, size, axis=2) for x in tables)
        return keys, values

    return PriorRows(read, size, tables[0].shape[2], jnp.asarray(starts, jnp.int32))


@pytest.fixture(scope="module")
def attend_after(attend: Any) -> Any:
    """Attention of a chunk that continues the rows in some tables."""

    def run(tables: Any, starts: Any, *chunk: Any, size: int) -> ChunkAttention:
        return attend(*chunk, earlier_rows(tables, size, starts))

    return jax.jit(run, static_argnames="size")


@settings(max_examples=15)
@given(st.lists(st.integers(0, 45), min_size=2, max_size=2), st.sampled_from([1, 8, 45]))
@example([17, 0], 8)
def test_chunks_go_on_where_the_rows_before_them_end(attend_after, starts, size):
    whole = prompts(2, 61, 6, 2)
    tables, chunk = stored(whole[1], whole[2], 64), [cut(x, starts, 16) for x in whole]
    got = attend_after(tables, jnp.array(starts, jnp.int32), *chunk, size=size)
    assert_close(got, [cut(x, starts, 16) for x in dense(*whole)])


@jax.jit
def mass_of(chunk: Any, tables: Any, starts: Any, span: Span) -> jax.Array:
    """Attention mass of a chunk that continues the rows in some tables."""
    before = earlier_rows(tables, 8, starts)
    q, keys, values = chunk
    log_sum = attend_chunk(q, keys, values, before).log_sum
    return attention_mass(q, keys, log_sum, span, before)


@pytest.mark.parametrize(
    "starts, counts", [([0, 0], [13, 4]), ([20, 5], [11, 13]), ([9, 9], [0, 2])]
)
def test_attention_that_slots_receive(starts, counts):
    q, keys, values = prompts(2, 40, 4, 2)
    chunk: Any = [cut(x, starts, 13) for x in (q, keys, values)]
    span = Span(jnp.array(starts, jnp.int32), jnp.array(counts, jnp.int32))
    got = mass_of(chunk, stored(keys, values, 45), jnp.array(starts, jnp.int32), span)
    weights = weights_of(q, keys)[0].sum(axis=2)  # [b, k, query, key]
    expected = np.zeros((2, 2, 45))
    for i in range(2):
        rows = weights[i, :, starts[i] : starts[i] + counts[i]]
        expected[i, :, :40] = rows.sum(axis=1)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


TOKENS, CAPACITY = 5, 64


@functools.partial(jax.jit, static_argnames=("first", "size", "side_by_side", "ahead"))
def attend_few(tables, starts, chunk, *, first, size, side_by_side, ahead):
    """Attend to the first rows at hand, to those of the tokens themselves, and to the rest."""
    q, keys, values = chunk
    places = jnp.arange(TOKENS)
    own = Seen(keys.swapaxes(1, 2), values.swapaxes(1, 2), (places[:, None] <= places[None])[None])
    sinks = [jnp.nan_to_num(x[:, :, :first]) for x in tables]
    near = Seen(sinks[0], sinks[1], (jnp.arange(first)[None] < starts[:, None])[:, :, None])
    prior = earlier_rows(tables, size, starts)._replace(first=first, side_by_side=side_by_side)
    at = starts[:, None] + places[None]
    return attend_narrow(q, [own, near], prior, at, ahead=ahead).output


@pytest.mark.parametrize(
    "side_by_side, ahead, first, size",
    [
        *((True, False, 9, 8), (False, False, 4, 13), (False, True, 4, 13)),
        *((True, False, 1, 64), (False, True, 9, 8)),
    ],
)
@given(starts=st.lists(st.integers(0, 56), min_size=2, max_size=2))
def test_few_tokens_after_any_beginning(starts, first, size, side_by_side, ahead):
    """Fewer and more first rows than a block; a block that does not divide the rows, and all."""
    q, keys, values = prompts(2, 61, 4, 2)
    expected = cut(dense(q, keys, values)[0], starts, TOKENS)
    # Rows of each sequence end where its tokens begin; what follows is unwritten.
    tables: Any = [np.array(x) for x in stored(keys, values, CAPACITY)]
    for table in tables:
        for row, start in zip(table, starts, strict=True):
            row[:, start:] = np.nan
    chunk: Any = [cut(x, starts, TOKENS) for x in (q, keys, values)]
    settings: Any = {"first": first, "size": size, "side_by_side": side_by_side, "ahead": ahead}
    got = attend_few([*map(jnp.asarray, tables)], jnp.array(starts, jnp.int32), chunk, **settings)
    np.testing.assert_allclose(got, expected, atol=TOLERANCE)


CHUNK = 256


@pytest.mark.parametrize(("rows", "batch"), [("int4", 1), slow("auto", 3)])
def test_temporaries_do_not_grow_with_the_prompt(rows, batch):
    """From 16 chunks to a million tokens, only the cache grows; on the device, the index."""
    chosen = engine("gqa", SPARSE, 1, rows=rows)
    short, long = (temporaries(chosen, CHUNK, n * CHUNK, batch) for n in (16, 4096))
    assert len(short) == 4  # of a layer on the host and one on the device: itself, what it keeps
    assert (np.array(long) <= 1.01 * np.array(short)).all()
    assert 0 < max(long) < 2**27


def test_a_chunk_at_the_end_of_128k_tokens():
    """Against dense attention in float64: slots, masks and blocks of earlier rows."""
    tokens, chunk = 131072, 64
    decoder = engine("gqa", SPARSE).decoder
    k, h, d = decoder.config.num_kv_heads, decoder.config.num_heads, decoder.config.head_dim
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(1, k, tokens, 2 * d)).astype(np.float32)
    q = rng.normal(size=(1, chunk, h, d)).astype(np.float32)
    start = tokens - chunk
    host = allocate_host((2, 1, k, tokens, 2 * d), jnp.float32, decoder.mesh)
    write = jax.jit(functools.partial(write_span, mesh=decoder.mesh), donate_argnums=0)
    whole = Span.whole(1, 4096)
    for at in range(0, start, 4096):
        new = jnp.asarray(rows[:, :, at : at + 4096])
        host = write(host, jnp.int32(1), new, Span(whole.start + at, whole.count))
    wanted = np.array([[[3, tokens // 2 + 5, tokens - 1], [7, tokens // 2, tokens - 8]]], np.int32)
    fetched = jax.jit(functools.partial(gather_rows, mesh=decoder.mesh))(host, jnp.int32(1), wanted)
    np.testing.assert_array_equal(fetched, np.take_along_axis(rows, wanted[..., None], axis=2))
    span = Span(jnp.array([start], jnp.int32), jnp.array([chunk], jnp.int32))

    @jax.jit
    def attend(host, q, keys, values):
        earlier = host_rows(decoder, host, jnp.int32(1), (), span)
        return attend_chunk(q, keys, values, earlier).output

    given = np.split(rows[:, :, start:].swapaxes(1, 2), 2, axis=-1)
    got = np.asarray(attend(host, jnp.asarray(q), *(jnp.asarray(x) for x in given)))
    keys, values = np.split(rows[0].astype(np.float64), 2, axis=-1)
    for head, row in ((0, 0), (h - 1, 17), (1, chunk - 1)):
        kv = head // (h // k)
        scores = keys[kv, : start + row + 1] @ q[0, row, head].astype(np.float64)
        expected = softmax(scores) @ values[kv, : start + row + 1]
        np.testing.assert_allclose(got[0, row, head], expected, atol=1e-5)
