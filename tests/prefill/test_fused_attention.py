"""Attention of chunks by cuDNN. Without a GPU, a stand-in does what its documentation says."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from infinigen_jax.prefill import attention as prompt_attention
from infinigen_jax.prefill import cudnn_attention as fused_attention
from infinigen_jax.prefill.prior_rows import PriorRows

TOLERANCE = 4e-6  # float32, sums over at most some hundred terms of size 1
D = 16


def stand_in(q: Any, keys: Any, values: Any, *, log: Any = jnp.log, **options: Any) -> Any:
    """`cudnn.dot_product_attention` in float32; masks are added to the scores."""
    assert options.pop("qkv_layout") == "BNTH" and options.pop("return_residual")
    mask, kind = options.pop("mask"), options.pop("mask_type")
    window, scale = options.pop("sliding_window_length"), options.pop("scale")
    assert not options
    b, h, c, d = q.shape
    n = keys.shape[2]
    grouped = q.reshape(b, keys.shape[1], -1, c, d)
    scores = scale * jnp.einsum("bkgcd,bknd->bkgcn", grouped, keys).reshape(b, h, c, n)
    if mask is not None:
        assert mask.shape == (b, 1, c, n)
        scores += jnp.where(mask, 0.0, -(2.0**41))
    distance = np.subtract.outer(np.arange(c), np.arange(n))[None, None]
    if kind == cudnn.MaskType.CAUSAL:
        scores = jnp.where(distance >= 0, scores, -jnp.inf)
    if window is not None:
        assert kind == cudnn.MaskType.CAUSAL  # nothing else has a window
        scores = jnp.where(distance < window, scores, -jnp.inf)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - peak)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = (weights / total).reshape(b, keys.shape[1], -1, c, n)
    output = jnp.einsum("bkgcn,bknd->bkgcd", weights, values).reshape(q.shape)
    return output, (peak + log(total))[..., 0]


@pytest.fixture
def by_stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a function in the place of cuDNN's."""

    def put(kernel: Any) -> None:
        monkeypatch.setattr(cudnn, "dot_product_attention", kernel)
        fused_attention.unavailable.cache_clear()
        fused_attention.refusal.cache_clear()

    put(stand_in)
    checked = fused_attention.unavailable
    yield put
    checked.cache_clear()


def drawn(*shape: int, seed: int) -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def chunk(b: int, c: int, h: int, k: int) -> Any:
    return tuple(drawn(b, c, n, D, seed=i) for i, n in enumerate((h, k, k)))


def before(start: list[int], k: int, size: int, capacity: int, ring: bool = False) -> PriorRows:
    """Rows before a chunk; NaN where none was written."""
    slots = np.arange(capacity)
    ends = np.array(start, np.int32)[:, None]
    # A ring's slots hold the last positions before the chunk.
    positions = (
        ends - 1 - (ends - 1 - slots) % capacity if ring else np.tile(slots, (len(start), 1))
    )
    there = (positions >= 0) & (positions < ends)
    rows = [drawn(len(start), k, capacity, D, seed=9 + i) for i in range(2)]
    keys, values = (jnp.where(there[:, None, :, None], x, jnp.nan) for x in rows)

    def read(at: Any, n: int) -> Any:
        return tuple(jax.lax.dynamic_slice_in_dim(x, at, n, axis=2) for x in (keys, values))

    kept = jnp.asarray(np.where(there, positions, -1), jnp.int32) if ring else None
    return PriorRows(read, size, capacity, jnp.asarray(start, jnp.int32), kept)


CASES: dict[str, tuple[Any, int | None]] = {  # of `before`, and the window
    "alone": (None, None),
    "alone, within a window": (None, 5),
    "nothing before": (((0, 0), 32, 96), None),
    "whole blocks": (((64, 64), 32, 96), None),
    "the same length, part of a block": (((70, 70), 32, 96), None),
    "other lengths": (((5, 90), 32, 96), None),
    "one begins": (((0, 64), 32, 96), None),
    "the last block reaches back": (((100, 77), 32, 101), None),
    "all room taken": (((96, 96), 32, 96), None),
    "a ring": (((100, 77), 16, 40, True), 40),
    "a ring not yet full": (((12, 100), 16, 40, True), 30),
    "a window": (((60, 70), 16, 80), 20),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("h, k", [(4, 2), pytest.param(3, 3, marks=pytest.mark.slow)])
def test_it_is_the_attention_of_the_other_form(by_stand_in: Any, case: str, h: int, k: int):
    places, window = CASES[case]
    earlier = places and before(list(places[0]), k, *places[1:])
    q, keys, values = chunk(2, 11, h, k)
    plain = functools.partial(prompt_attention._attend, earlier, window, None, True)
    expected = jax.jit(plain)(q, keys, values)
    got = jax.jit(functools.partial(fused_attention.attend, earlier, window))(q, keys, values)
    np.testing.assert_allclose(got.output, expected.output, atol=TOLERANCE)
    np.testing.assert_allclose(got.log_sum, expected.log_sum, atol=TOLERANCE)


@pytest.mark.parametrize(
    "start, whole", [((64, 64), 2), ((95, 64), 2), ((31, 96), 0), ((96, 200), 3)]
)
def test_whole_blocks_need_no_mask(by_stand_in: Any, start: tuple[int, int], whole: int):
    masks = []

    def counting(*arrays: Any, **options: Any) -> Any:
        masked = options["mask"] is not None
        jax.debug.callback(lambda: masks.append(masked), ordered=True)
        return stand_in(*arrays, **options)

    by_stand_in(counting)
    earlier = before(list(start), 2, 32, 96)
    jax.block_until_ready(
        jax.jit(functools.partial(fused_attention.attend, earlier, None))(*chunk(2, 8, 2, 2))
    )
    jax.effects_barrier()
    others = -(-min(max(start), 96) // 32) - whole
    assert masks == [False] * (1 + whole) + [True] * others


@pytest.mark.parametrize("windowed", [False, True])
def test_the_check_takes_what_is_right(by_stand_in: Any, windowed: bool):
    """Inside a trace too, where the first prompt would ask for it."""
    with jax.transfer_guard("disallow"):
        assert jax.jit(lambda: fused_attention.unavailable("float32", D, windowed) is None)()


def shifted(*arrays: Any, **options: Any) -> Any:
    output, log_sum = stand_in(*arrays, **options)
    return jnp.roll(output, 1, axis=1), log_sum


def rounded(*arrays: Any, **options: Any) -> Any:
    output, log_sum = stand_in(*arrays, **options)
    return output, log_sum.astype(jnp.bfloat16).astype(jnp.float32)


def without_window(*arrays: Any, **options: Any) -> Any:
    return stand_in(*arrays, **options | {"sliding_window_length": None})


def unmasked(*arrays: Any, **options: Any) -> Any:
    return stand_in(*arrays, **options | {"mask": None})


def missing(*arrays: Any, **options: Any) -> Any:
    raise RuntimeError("cuDNN\n is not detected.")


@pytest.mark.parametrize(
    "kernel, reason",
    [
        (rounded, "differs from plain attention by"),
        (functools.partial(stand_in, log=jnp.log2), "differs from plain attention by"),
        (shifted, "differs from plain attention by"),
        (unmasked, "differs from plain attention by"),
        (lambda *x, **y: jax.tree.map(lambda z: z * jnp.nan, stand_in(*x, **y)), "by nan"),
        (missing, "cuDNN is not detected."),
    ],
)
def test_the_check_refuses_what_is_wrong(by_stand_in: Any, kernel: Any, reason: str):
    by_stand_in(kernel)
    assert reason in (fused_attention.unavailable("float32", D) or "")


def test_the_check_looks_at_windows_where_there_are_some(by_stand_in: Any):
    by_stand_in(without_window)
    assert fused_attention.unavailable("float32", D) is None
    assert "differs" in (fused_attention.unavailable("float32", D, windowed=True) or "")


def test_the_switch_leaves_it_to_xla(by_stand_in: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("INFINIGEN_JAX_KERNELS", "0")
    assert fused_attention.unavailable("float32", D) == "INFINIGEN_JAX_KERNELS is 0"


def test_usable_for_half_precision_on_a_gpu(by_stand_in: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fused_attention, "unavailable", lambda *_: None)
    half = jnp.zeros((1, 2, 2, D), jnp.bfloat16)
    assert not fused_attention.usable(half, 1)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert fused_attention.usable(half, 1)
    assert not fused_attention.usable(half.astype(jnp.float32), 1)
    assert not fused_attention.usable(half[..., :12], 1)
    monkeypatch.setattr(fused_attention, "unavailable", lambda *_: "not there")
    assert not fused_attention.usable(half, 1)


def test_sizes_that_cudnn_refuses(by_stand_in: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any):
    """Each call is compiled alone before it is part of a program."""
    seen = []

    def particular(q: Any, keys: Any, values: Any, **options: Any) -> Any:
        seen.append((q.shape[2], keys.shape[2], options["mask"] is not None))
        if options["mask"] is not None and keys.shape[2] % 2:
            raise ValueError("no engine\nfor this")
        return stand_in(q, keys, values, **options)

    by_stand_in(particular)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(fused_attention, "unavailable", lambda *_: None)
    half = jnp.zeros((1, 6, 2, D), jnp.bfloat16)
    assert fused_attention.usable(half, 1, before([7], 1, 32, 96))
    assert seen == [(6, 6, False), (6, 32, True), (6, 32, False)]
    odd = before([7], 1, 9, 27, ring=True)
    assert not fused_attention.usable(half, 1, odd, 27)
    assert not fused_attention.usable(half, 1, odd, 27)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "bfloat16 queries [1, 6, 2, 16]): no engine for this" in warning


@pytest.mark.gpu
@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_cudnn_is_used_on_a_gpu(head_dim: int, windowed: bool):
    assert fused_attention.unavailable("bfloat16", head_dim, windowed) is None
