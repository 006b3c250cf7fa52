"""The CUDA kernels on a real GPU: `python -m pytest -m gpu`.

The cases of `check_kernels` in more shapes, and larger ones.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from runtime import ALL, SPARSE, random_model, scores_of, tokens_of

from infinigen_jax import check_kernels as check
from infinigen_jax import cuda
from infinigen_jax.check_kernels import difference
from infinigen_jax.engine.engine import Engine
from infinigen_jax.transfer.cuda import CudaTransfer
from infinigen_jax.transfer.xla import XlaTransfer

pytestmark = pytest.mark.gpu

SHAPES = [
    pytest.param(1, 8, 100, 256, jnp.bfloat16, id="bfloat16, head size 128"),
    pytest.param(3, 4, 77, 16, jnp.float32, id="float32, head size 8"),
    pytest.param(2, 5, 33, 80, jnp.float16, id="float16, head size 40"),
    pytest.param(2, 8, 333, 272, jnp.uint8, id="int8"),
    pytest.param(1, 2, 50, 144, jnp.uint8, id="int4"),
]


@pytest.fixture(autouse=True)
def usable() -> None:
    assert cuda.unavailable() is None


@pytest.mark.parametrize("b, k, n, w, dtype", SHAPES)
def test_rows_are_those_of_the_reference(b, k, n, w, dtype):
    assert difference(check.gathered(b, k, n, w, dtype, steps=20)) is None


@pytest.mark.parametrize("blocks, threads", [(1, 32), (3, 96), (132, 1024)])
def test_any_grid_moves_the_same(blocks: int, threads: int):
    transfer = CudaTransfer(blocks, threads)
    rows = check.gathered(2, 3, 70, 24, jnp.float32, transfer=transfer)
    assert difference(rows) is None


@pytest.mark.parametrize("b, k, n, w, dtype", SHAPES)
def test_the_hot_set_is_that_of_the_reference(b, k, n, w, dtype):
    assert difference(check.gathered_hot(b, k, n, w, dtype, steps=8)) is None


@pytest.mark.parametrize("alpha", [4.0, math.inf])
@pytest.mark.parametrize("b, k, g, t, budget", [(1, 8, 1, 5000, 0.05), (3, 2, 4, 33000, 0.1)])
@pytest.mark.parametrize("tied", [False, True])
def test_selection(b: int, k: int, g: int, t: int, budget: float, alpha: float, tied: bool):
    assert difference(check.selected(b, k, g, t, budget, alpha, tied)) is None


@pytest.mark.parametrize("b, k, g, r, t", [(2, 8, 4, 128, 8192), (1, 2, 7, 30, 1152)])
def test_scores(b: int, k: int, g: int, r: int, t: int):
    assert difference(check.scored(b, k, g, r, t)) is None
    assert difference(check.left(b, k, g, r, t)) is None


@pytest.mark.parametrize(
    "g, d, n, cap", [(1, 8, 3, None), (4, 128, 5000, None), (9, 256, 700, 3.0), (3, 112, 300, None)]
)
def test_attention_to_fetched_rows(g: int, d: int, n: int, cap: float | None):
    assert difference(check.attended(2, 8, g, d, n, cap)) is None


@pytest.mark.parametrize("name", ["gqa", "gemma2"])
def test_attention_by_a_kernel_is_that_of_xla(monkeypatch: pytest.MonkeyPatch, name: str):
    scores = []
    for transfer in (XlaTransfer(), CudaTransfer()):
        made = "infinigen_jax.engine.runtime.make_transfer"
        monkeypatch.setattr(made, lambda name, t=transfer: t)
        scores.append(scores_of(random_model(name, "bfloat16"), ALL))
    # XLA rounds the weights of attention to bfloat16, by 2^-9 of their size.
    np.testing.assert_allclose(*scores, rtol=2**-9, atol=0.02)


@pytest.mark.parametrize("wide", [False, True])
def test_replacement(wide: bool):
    assert difference(check.replaced(wide, 2, 8, 300, 700, 3000, 1200, steps=8)) is None


@pytest.mark.parametrize("schedule", ["fused", "layerwise"])
@pytest.mark.parametrize("hot_set", [0.0, 1.5])
def test_generated_tokens_are_those_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, schedule: str, hot_set: float
):
    settings: dict[str, Any] = {"policy": SPARSE, "schedule": schedule}
    tokens = []
    for transfer, size in (
        (XlaTransfer(), 0.0),
        (XlaTransfer(), hot_set),
        (CudaTransfer(), hot_set),
    ):
        monkeypatch.setattr(
            "infinigen_jax.engine.runtime.make_transfer", lambda name, t=transfer: t
        )
        tokens.append(tokens_of(Engine(random_model("gqa"), hot_set=size, **settings)))
    assert tokens[0] == tokens[1] == tokens[2]
