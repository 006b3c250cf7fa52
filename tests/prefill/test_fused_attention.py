"""Attention of chunks by cuDNN: its use and its check, with a stand-in for a GPU."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from infinigen_jax.prefill import cudnn_attention as fused_attention
from infinigen_jax.prefill.prior_rows import PriorRows

D = 16


@pytest.fixture
def by_stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that replaces cuDNN's attention."""

    def put(kernel: Any) -> None:
        monkeypatch.setattr(cudnn, "dot_product_attention", kernel)
        fused_attention.unavailable.cache_clear()
        fused_attention.refusal.cache_clear()

    put(stand_in)
    checked = fused_attention.unavailable
    yield put
    checked.cache_clear()


def before(start: tuple[int, ...], size: int, capacity: int, ring: bool = False) -> PriorRows:
    rows, positions = jnp.zeros((len(start), 1, capacity, D)), None
    if ring:
        positions = jnp.zeros((len(start), capacity), jnp.int32)

    def read(at: Any, n: int) -> Any:
        return (jax.lax.dynamic_slice_in_dim(rows, at, n, axis=2),) * 2

    return PriorRows(read, size, capacity, jnp.array(start, jnp.int32), positions)


@pytest.mark.parametrize(
    "start, whole", [((64, 64), 2), ((95, 64), 2), ((31, 96), 0), ((96, 200), 3)]
)
def test_blocks_that_need_no_mask(start: tuple[int, int], whole: int):
    assert before(start, 32, 96).whole_blocks == whole


@pytest.mark.parametrize("windowed", [False, True])
def test_the_check_takes_what_is_right(by_stand_in: Any, windowed: bool):
    """Inside a trace too, where the first prompt would ask for it."""
    with jax.transfer_guard("disallow"):
        assert jax.jit(lambda: fused_attention.unavailable("float32", D, windowed) is None)()


def changed(after: Any = lambda *results: results, **others: Any) -> Any:
    """Return a stand-in whose results or options are changed."""
    return lambda *arrays, **options: after(*stand_in(*arrays, **options | others))


def missing(*arrays: Any, **options: Any) -> Any:
    raise RuntimeError("cuDNN\n is not detected.")


@pytest.mark.parametrize(
    "kernel, reason",
    [
        (changed(lambda output, logs: (jnp.roll(output, 1, axis=1), logs)), "by "),
        (changed(lambda output, logs: (output, logs.astype(jnp.bfloat16).astype("f"))), "by "),
        (changed(log=jnp.log2), "by "),
        (changed(mask=None), "by "),
        (changed(lambda output, logs: (output * jnp.nan, logs)), "by nan"),
    ],
)
def test_the_check_refuses_what_is_wrong(by_stand_in: Any, kernel: Any, reason: str):
    by_stand_in(kernel)
    found = fused_attention.unavailable("float32", D) or ""
    assert f"differs from plain attention {reason}" in found
    by_stand_in(missing)
    assert "cuDNN is not detected." in (fused_attention.unavailable("float32", D) or "")


def test_the_check_looks_at_windows_where_there_are_some(by_stand_in: Any):
    by_stand_in(changed(sliding_window_length=None))
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
    assert fused_attention.usable(half, 1, before((7,), 32, 96))
    assert seen == [(6, 6, False), (6, 32, True), (6, 32, False)]
    odd = before((7,), 9, 27, ring=True)
    assert not fused_attention.usable(half, 1, odd, 27)
    assert not fused_attention.usable(half, 1, odd, 27)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "bfloat16 queries [1, 6, 2, 16]): no engine for this" in warning


@pytest.mark.gpu
@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_cudnn_is_used_on_a_gpu(head_dim: int, windowed: bool):
    assert fused_attention.unavailable("bfloat16", head_dim, windowed) is None


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
