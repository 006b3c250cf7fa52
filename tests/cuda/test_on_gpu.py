"""The CUDA kernels on a real GPU: `python -m pytest -m gpu`."""

import itertools
import math
from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from emulated_gpu import case_name
from runtime import ALL, SPARSE, engine, random_model, scores_of, tokens_of

from infinigen_jax import check_kernels as check
from infinigen_jax import cuda
from infinigen_jax.check_kernels import difference
from infinigen_jax.transfer import Transfer

pytestmark = pytest.mark.gpu

TAIL = replace(
    SPARSE,
    speculate_from="resident",
    tail=True,
    tail_tokens=32,
    index_dtype="int4",
    partial_ratio=1.0,
)

SHAPES = [
    (1, 8, 100, 256, jnp.bfloat16),  # a head size of 128
    (3, 4, 77, 16, jnp.float32),  # of 8
    (2, 5, 33, 80, jnp.float16),  # of 40
    (2, 8, 333, 272, jnp.uint8),  # int8
    (1, 2, 50, 144, jnp.uint8),  # int4
]
GRIDS = [Transfer("cuda", blocks=x, threads=y) for x, y in ((1, 32), (3, 96), (132, 1024))]
SELECTED = [(1, 8, 1, 5000, 0.05), (3, 2, 4, 33000, 0.1)]
SCORED = [(2, 8, 4, 128, 8192), (1, 2, 7, 30, 1152)]
ATTENDED = [(1, 8, 3), (4, 128, 5000), (9, 256, 700, 3.0), (3, 112, 300)]
CASES = [
    *(partial(check.gathered, *shape, steps=20) for shape in SHAPES),
    *(partial(check.gathered, 2, 3, 70, 24, jnp.float32, transfer=grid) for grid in GRIDS),
    *(partial(check.gathered, *shape, steps=8, spare=shape[2]) for shape in SHAPES),
    *(
        partial(check.selected, *sizes, alpha, draw)
        for sizes, alpha, draw in itertools.product(
            SELECTED, (4.0, math.inf), (check.normal, check.tied)
        )
    ),
    *(partial(check.scored, *sizes) for sizes in SCORED),
    *(partial(check.left, *sizes) for sizes in SCORED),
    *(partial(check.attended, 2, 8, *sizes) for sizes in ATTENDED),
    *(partial(check.replaced, wide, 2, 8, 300, 700, 3000, 1200, steps=8) for wide in (False, True)),
]


@pytest.fixture(autouse=True)
def usable() -> None:
    assert cuda.unavailable() is None


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_results_are_those_of_the_reference(case: partial):
    assert difference(case()) is None


def use(monkeypatch: pytest.MonkeyPatch, transfer: Transfer) -> None:
    """Make engines move rows by a transfer from now on."""
    monkeypatch.setattr("infinigen_jax.engine.runtime.make_transfer", lambda name: transfer)


@pytest.mark.parametrize("name", ["gqa", "gemma2"])
def test_attention_by_a_kernel_is_that_of_xla(monkeypatch: pytest.MonkeyPatch, name: str):
    scores = []
    for transfer in (Transfer(), Transfer("cuda")):
        use(monkeypatch, transfer)
        scores.append(scores_of(random_model(name, "bfloat16"), ALL))
    # XLA rounds the weights of attention to bfloat16, by 2^-9 of their size.
    np.testing.assert_allclose(*scores, rtol=2**-9, atol=0.02)


@pytest.mark.parametrize("policy", [SPARSE, TAIL], ids=["sparse", "tail"])
@pytest.mark.parametrize("schedule", ["fused", "layerwise"])
@pytest.mark.parametrize("hot_set", [0.0, 1.5])
def test_generated_tokens_are_those_of_the_reference(monkeypatch, policy, schedule, hot_set):
    tokens, kernels = [], Transfer("cuda")
    for transfer, size in ((Transfer(), 0.0), (Transfer(), hot_set), (kernels, hot_set)):
        use(monkeypatch, transfer)
        made = engine.__wrapped__("gqa", policy, 0, schedule, hot_set=size)
        assert made.decoder.host_layers == 2
        tokens.append(tokens_of(made))
    assert tokens[0] == tokens[1] == tokens[2]
