"""Configurations of the engine that cover pairs of settings, as on a CPU and as on a GPU.

Every case belongs to a family of settings that determine the tokens. All other settings must change
neither the tokens nor the number of selected rows: the schedule, a hot set, where the weights are,
how rows are transferred, the pieces in which a prompt is read, and the neighbours in the batch. The
reference of a family decodes each prompt alone.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import emulated_gpu
import jax
import numpy as np
import pytest
from emulated_gpu import launched
from runtime import ALL, NEW, SPARSE, counts_of, finished, numbers, random_model, slow_except

from infinigen_jax import Engine, EngineSettings, Pool, Run, cuda
from infinigen_jax.numeric import whole_number
from infinigen_jax.policies import H2O, Full, InfiniGenPaper, Oracle, Policy
from infinigen_jax.programs.compilations import compilations
from infinigen_jax.settings.setting import Option, options_of
from infinigen_jax.transfer import Transfer
from infinigen_jax.transfer.host_weights import STAYS

PROMPTS = [numbers(37), [7], numbers(21)]  # one shorter than window and sinks together
# `index_rest` needs tail blocks of 32 or more tokens; the longest prompt has two.
TAIL = dataclasses.replace(SPARSE, tail=True, tail_tokens=32, index_dtype="int4", partial_ratio=1.0)
ONE_MEAN = dataclasses.replace(SPARSE, tail=True, tail_tokens=0)


class Family(NamedTuple):
    """Settings that determine the tokens; `settings` are the engine's."""

    policy: Policy
    model: str = "gqa"
    dtype: str = "float32"
    dense_layers: int = 0
    settings: dict[str, Any] = {}


FAMILIES = {
    "full": Family(Full(), dense_layers=2),  # everything on the device
    "sparse": Family(SPARSE, "gated"),
    "resident": Family(dataclasses.replace(TAIL, speculate_from="resident"), dtype="bfloat16"),
    "small-rows": Family(dataclasses.replace(TAIL, query="own"), "one", settings={"rows": "int8"}),
    "opt": Family(SPARSE, "opt"),
    "h2o": Family(H2O(budget=0.2, window=4, sinks=2), "one", "bfloat16"),
    "pool": Family(ONE_MEAN, "one", settings={"pool": Pool(tokens=18)}),
}


class Case(NamedTuple):
    """Differences from the family's reference.

    Attributes:
        policy, dense_layers: other values that fetch everything, for a full family.
        crosses: rows are copied, as to a device with separate memory.
        batch: prompts decoded together; the others wait. None for all.
    """

    family: str
    schedule: str
    settings: dict[str, Any] = {}
    policy: Policy | None = None
    dense_layers: int | None = None
    crosses: bool = False
    batch: int | None = None


HOST: dict[str, Any] = {"weights": "host"}
CHUNKS: dict[str, Any] = {"prefill_chunk": 16}
HOT: dict[str, Any] = {"hot_set": 2.0}
POOL: dict[str, Any] = {"pool": Pool(share=1.0), "hot_set": 1.0}
OWN = dataclasses.replace(ALL, query="own")
RESIDENT = dataclasses.replace(ALL, speculate_from="resident")
# It streams the first layer.
PAPER = InfiniGenPaper(alpha=float("inf"), budget=1.0, count="head", streamed_layers=1)
CASES = {
    "everything": Case("full", "fused", CHUNKS, ALL, 1),
    "everything-moved": Case("full", "layerwise", HOT | HOST, RESIDENT, 0, crosses=True),
    "everything-own-query": Case("full", "fused", {"check": True}, OWN, 0),
    "everything-pool": Case("full", "fused", POOL | HOST, ALL, 1, crosses=True),
    "streamed": Case("full", "layerwise", CHUNKS, Full(window=5, sinks=2), 0, batch=2),
    "streamed-moved": Case("full", "fused", {}, Full(), 1, crosses=True),
    "paper": Case("full", "layerwise", {}, PAPER, 0),
    "oracle": Case("full", "layerwise", HOT, Oracle(budget=1.0, window=4), 0),
    "sparse": Case("sparse", "fused", HOT | HOST),
    "sparse-moved": Case("sparse", "layerwise", HOT | HOST, crosses=True),
    "resident": Case("resident", "layerwise", HOT, batch=2),
    "small-rows": Case("small-rows", "layerwise", HOT | HOST),
    "opt": Case("opt", "layerwise", HOT | HOST | CHUNKS),
    "pool": Case("pool", "layerwise", HOT, batch=2),
    "h2o": Case("h2o", "layerwise", batch=2),
}


def engine_of(family: Family, schedule: str = "fused", **settings: Any) -> Engine:
    model = random_model(family.model, family.dtype)
    settings = {"policy": family.policy, "dense_layers": family.dense_layers} | settings
    return Engine(model, schedule=schedule, **family.settings, **settings)


def places(engine: Engine) -> dict[tuple[str, bool], set[str | None]]:
    """Return the memory kinds of the layers' parameters, by part and whether they are matrices."""
    found: dict[tuple[str, bool], set[str | None]] = {}
    for layer in engine.runtime.weights.params["layers"]:
        for part, parameters in layer.items():
            for x in jax.tree.leaves(parameters):
                found.setdefault((part, x.ndim == 2), set()).add(x.sharding.memory_kind)
    return found


@functools.cache
def reference(name: str) -> tuple[list[list[int]], np.ndarray]:
    """Return tokens of each prompt, decoded alone, and rows selected in each step for each."""
    engine = engine_of(FAMILIES[name])
    runs = [finished(engine, [prompt]) for prompt in PROMPTS]
    counts = np.concatenate([counts_of(run) for run in runs], axis=1)
    return [run.new_tokens[0] for run in runs], counts


def decoded(engine: Engine, batch: int | None) -> Run:
    """Return a finished run; no part of the cache leaves its memory, and its host array stays."""
    run = engine.start(PROMPTS, max_new_tokens=NEW, batch=batch)
    address = run.cache.host.unsafe_buffer_pointer()
    for _ in run.tokens(ignore_eos=True):
        assert run.cache.host.unsafe_buffer_pointer() == address
        assert run.cache.host.sharding.memory_kind == "pinned_host"
        rest = run.cache._replace(host=None)
        assert {x.sharding.memory_kind for x in jax.tree.leaves(rest)} == {"device"}
    return run


TRANSFER = "infinigen_jax.engine.runtime.make_transfer"
# The slow ones are pairs that other cases cover as well, and H2O.
OFTEN = ("everything", "everything-moved", "paper", "sparse", "small-rows")


@pytest.mark.parametrize("name", slow_except(CASES, *OFTEN, "pool"))
def test_only_the_family_decides_about_tokens(name, monkeypatch):
    case = CASES[name]
    reference(case.family)
    short_chunks(monkeypatch)
    if case.crosses:
        monkeypatch.setattr(TRANSFER, lambda name: Transfer())
        monkeypatch.setattr("infinigen_jax.transfer.rows.CHUNK", 3)  # several of a request
    compare(case, in_place=not case.crosses)


class TestAsOnAGpu:
    """Emulated kernels, and the branches of programs that a CPU leaves out."""

    pytestmark = [*emulated_gpu.MARKS, pytest.mark.slow]

    @pytest.fixture(autouse=True, scope="class")
    @staticmethod
    def own_programs() -> Iterator[None]:
        """Forget traces of inner functions, which may have a CPU's branches."""
        jax.clear_caches()
        yield
        jax.clear_caches()

    @pytest.mark.parametrize("name", CASES)
    def test_only_the_family_decides_about_tokens(self, name, monkeypatch):
        reference(CASES[name].family)
        short_chunks(monkeypatch)
        emulated_gpu.install(monkeypatch)
        # A grid of no other test, so that all programs are new.
        monkeypatch.setattr(TRANSFER, lambda name: Transfer("cuda", threads=256))
        monkeypatch.setattr(cuda, "in_use", lambda: True)
        monkeypatch.setattr(jax.lax, "platform_dependent", lambda *x, default, **cpu: default(*x))
        compare(CASES[name], in_place=False)
        assert bool(launched["index_rest"]) == (name == "resident")


def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the longest prompt have three chunks with CHUNKS; other cases read it whole."""
    monkeypatch.setattr("infinigen_jax.prefill.prefill.CHUNK_UNIT", 16)
    checked = Option("", check=whole_number(16))
    monkeypatch.setitem(options_of(EngineSettings), "prefill_chunk", checked)


def compare(case: Case, in_place: bool) -> None:
    """Compare a case's tokens, rows and compilations with the reference of its family."""
    tokens, counts = reference(case.family)
    assert case.family.startswith("full") or (counts.max(axis=0) > 0).all()
    changes = {"policy": case.policy, "dense_layers": case.dense_layers}
    given = {key: value for key, value in changes.items() if value is not None}
    engine = engine_of(FAMILIES[case.family], case.schedule, **case.settings, **given)
    assert engine.decoder.transfer.in_place == in_place
    run = decoded(engine, case.batch)
    on_host = "weights" in case.settings
    for (part, matrix), kinds in places(engine).items():
        moved = on_host and matrix and part not in STAYS
        assert kinds == {"pinned_host" if moved else "device"}, part
    assert run.new_tokens == tokens
    stats = run.stats()
    assert stats.compilations_after_warmup == 0
    if case.policy is not None:
        cached = run.prompt_lengths + np.arange(1, NEW)[:, None]
        eligible = np.maximum(cached - case.policy.window - case.policy.sinks, 0)
        counts = eligible * run.decoder.host_layers * run.decoder.config.num_kv_heads
    if case.batch is None:
        np.testing.assert_array_equal(counts_of(run), counts)
    if "hot_set" in case.settings:
        assert 0 < stats.hot_set_hit_rate < 1
        assert 0 < stats.fetched_fraction < stats.selected_fraction
    # Other prompts of the same padded lengths find every program compiled.
    before, (longest, _, other) = compilations(), PROMPTS
    engine.generate([longest[::-1], [8, 9], other[:-1]], None, NEW, batch=case.batch)
    assert compilations() == before
