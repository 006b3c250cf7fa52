"""The `cuda` transfer on the CPU with emulated kernels; `cuda/test_kernels.py` tests those."""

import dataclasses
from collections.abc import Callable
from typing import Any

import emulated_gpu
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated_gpu import launched
from runtime import ALL, engine, random_model, scores_of, tokens_of
from tiny import refuses

from infinigen_jax import cuda
from infinigen_jax.cache.host_array import default_mesh
from infinigen_jax.check_kernels import CAPACITY, LAYERS, random_host, random_request
from infinigen_jax.engine import runtime
from infinigen_jax.selection.select import Request
from infinigen_jax.transfer import Transfer, make_transfer

pytestmark = emulated_gpu.MARKS


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated_gpu.install(monkeypatch)


def fetch(transfer: Any, host: Any, layer: Any, wanted: Request) -> jax.Array:
    """Return rows; padding is zeros."""
    rows, hot = transfer.fetch(host, layer, wanted, None, None, default_mesh())
    assert hot is None
    return jnp.where(wanted.valid[..., None], rows, 0)


compiled_fetch = jax.jit(fetch, static_argnums=0)


def test_slots_that_sequences_share():
    """Two more rows of the array after the sequences' own, whose slots all share."""
    b, k, n = 2, 3, 5
    stored, host = random_host(b + 2, k, 8, jnp.float32)
    for layer in range(LAYERS):
        wanted = random_request(b, k, n, 3 * CAPACITY, layer)
        rows = np.stack([np.concatenate([*stored[layer, b:], own], 1) for own in stored[layer, :b]])
        expected = np.take_along_axis(rows, np.asarray(wanted.slots)[..., None], axis=2)
        expected[~np.asarray(wanted.valid)] = 0
        for transfer in (Transfer(), Transfer("cuda")):
            got = compiled_fetch(transfer, host, jnp.int32(layer), wanted)
            np.testing.assert_array_equal(got, expected)
    assert launched["gather_rows"] == LAYERS


def test_rows_that_are_not_whole_vectors_are_refused():
    _, host = random_host(1, 1, 6, jnp.float32)
    given = Transfer("cuda"), host, jnp.int32(0), random_request(1, 1, 4, 8, 0)
    refuses("rows of 24 bytes", compiled_fetch, *given)


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that makes engines use the kernels."""

    def use() -> None:
        monkeypatch.setattr(f"{runtime.__name__}.make_transfer", lambda name: Transfer("cuda"))
        monkeypatch.setattr(cuda, "in_use", lambda: True)
        launched.clear()

    return use


def test_generated_tokens_are_those_of_the_reference(by_kernels: Callable[[], None]):
    expected = tokens_of(engine("one", hot_set=1.5))
    by_kernels()
    assert tokens_of(engine.__wrapped__("one", hot_set=1.5)) == expected
    assert launched["gather_rows"] + launched["gather_rows_hot"] == launched["select_rows"] > 0
    assert launched["replace_entries_16"] == launched["gather_rows_hot"]
    assert launched["gather_rows_hot"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one", "gemma2"])
def test_a_kernel_attends_to_rows_in_bfloat16(by_kernels: Callable[[], None], name: str):
    """The kernel differs from XLA by less than XLA differs from float32."""
    model = random_model(name, "bfloat16")
    params = jax.tree.map(lambda x: x.astype(jnp.float32), model.params)
    exact = dataclasses.replace(model, dtype=jnp.dtype("float32"), params=params)
    by_xla, expected = scores_of(model, ALL), scores_of(exact, ALL)
    by_kernels()
    difference, error = (x.ravel() for x in (scores_of(model, ALL) - by_xla, by_xla - expected))
    size = np.linalg.norm
    assert size(error) < 2**-9 * size(expected)  # which is rounding to bfloat16
    for order in (2, np.inf):
        assert 0 < size(difference, order) < size(error, order)
    assert launched["attend_rows"] == launched["select_rows"] > 0


def test_without_a_gpu_it_says_so_once(caplog: pytest.LogCaptureFixture):
    assert cuda.unavailable() == "JAX sees no NVIDIA GPU" and not cuda.in_use()
    for name in ("auto", "xla"):
        assert make_transfer(name).name == "xla"
    assert not caplog.messages
    assert make_transfer("cuda").name == "xla"
    assert caplog.messages == ["transfer cuda: JAX sees no NVIDIA GPU; using xla instead"]


def test_on_a_gpu_it_is_the_default(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(cuda, "unavailable", lambda: None)
    assert cuda.in_use()
    for name in ("auto", "cuda"):
        assert make_transfer(name).name == "cuda"
    assert make_transfer("xla").name == "xla"
