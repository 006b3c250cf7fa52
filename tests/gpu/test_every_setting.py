"""Every policy and setting, compiled for a GPU.

An engine runs on the CPU, with rows moved as on a GPU, and the programs that it called are
compiled: those of a fused step also with the `cuda` transfer and kernels, those of a prompt in half
precision also with cuDNN's attention. This only shows that XLA accepts them. It takes six minutes.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest
import step_programs as sp
from compile_for_gpu import compile_for_gpu
from jax import core

sys.path.append(str(Path(__file__).parents[1]))
from runtime import RAGGED, SPARSE, random_model

from infinigen_jax import Engine, Pool, cuda
from infinigen_jax.decode.steps import steps
from infinigen_jax.policies import POLICIES, InfiniGen, Policy
from infinigen_jax.prefill.compiled import read_layer
from infinigen_jax.programs.program import Program
from infinigen_jax.transfer import Transfer

pytestmark = pytest.mark.slow

INFINIGEN = dataclasses.replace(
    SPARSE, tail=True, partial_ratio=1.0, index_dtype="int4", tail_tokens=8
)
FULL, ONE_MEAN = POLICIES["full"](), dataclasses.replace(INFINIGEN, tail_tokens=0)
CHANGES: list[dict[str, Any]] = [
    *({"count": "mean"}, {"query": "own"}, {"speculate_from": "resident"}, {"tail": False}),
    *({"index_dtype": "float32"}, {"index_dtype": "bfloat16"}, {"tail_tokens": 0}),
]
HOT, ON_HOST, POOL = {"hot_set": 2.0}, {"dense_layers": 0}, {"pool": Pool(share=0.8)}
WEIGHTS, LAYERWISE = {"weights": "host"}, {"schedule": "layerwise"}
PREFIX, WAITING = {"prefix": range(3, 43)}, {"batch": 1}
CHUNKS = {"prefix": range(3, 93), "prefill_chunk": 64}
SETTINGS: list[dict[str, Any]] = [HOT, HOT | LAYERWISE, WEIGHTS, LAYERWISE, {"check": True}]
SETTINGS += [PREFIX, WAITING, CHUNKS]
POOLS = [{"pool": Pool(share=0.8, eviction=name)} for name in ("fifo", "lru", "counter")]
LOSSLESS: dict[str, Any] = {"lossless": True, "draft_tokens": 3}
VERIFIED = [{"rows": "int8"}, WEIGHTS, PREFIX, WAITING]
CASES: list[tuple[str, Policy, dict[str, Any]]] = [
    *((name, INFINIGEN, {}) for name in ("gqa", "opt", "windows", "qwen3")),
    *((name, INFINIGEN, {"dtype": "bfloat16"}) for name in ("gqa", "opt", "windows")),
    *(
        ("gqa", kind(window=4), ON_HOST)
        for name, kind in POLICIES.items()
        if name != "infinigen-paper"
    ),
    ("gqa", POLICIES["infinigen-paper"](), {}),
    *(("gqa", dataclasses.replace(INFINIGEN, **changes), {}) for changes in CHANGES),
    *(
        ("gqa", policy, {"rows": rows, **settings})
        for rows in ("int8", "int4")
        for policy, settings in ((INFINIGEN, {}), (INFINIGEN, HOT), (FULL, ON_HOST))
    ),
    *(("gqa", INFINIGEN, settings) for settings in SETTINGS),
    *(("gqa", ONE_MEAN, pool) for pool in POOLS),
    ("gqa", ONE_MEAN, POOL | HOT),
    ("gqa", FULL, POOL | ON_HOST),
    *(("gqa", INFINIGEN, LOSSLESS | settings) for settings in VERIFIED),
    ("gemma2", INFINIGEN, LOSSLESS | ON_HOST),
]


class Call(NamedTuple):
    """Program, and its first arguments of some shapes."""

    name: str
    program: Program
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


def _shaped(x: Any) -> Any:
    if not isinstance(x, jax.Array):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, Call]:
    """Record the calls of the package's programs from now on."""
    found: dict[str, Call] = {}
    run = Program.__call__

    def recorded(program: Program, *arguments: Any, **keywords: Any) -> Any:
        leaves = jax.tree.leaves((arguments, keywords))
        if not any(isinstance(leaf, core.Tracer) for leaf in leaves):
            shaped = jax.tree.map(_shaped, (arguments, keywords))
            name = program._name.partition("[")[0].rpartition(".")[2]
            found.setdefault(f"{name} {shaped}", Call(name, program, *shaped))
        return run(program, *arguments, **keywords)

    monkeypatch.setattr(Program, "__call__", recorded)
    monkeypatch.setattr("infinigen_jax.engine.runtime.make_transfer", lambda name: Transfer())
    return found


def label(value: Any) -> str:
    """Return a model's name, a policy's with what differs from INFINIGEN, or settings."""
    if isinstance(value, str):
        return value
    if isinstance(value, Policy):
        usual = vars(INFINIGEN if isinstance(value, InfiniGen) else value)
        others = {name: x for name, x in vars(value).items() if x != usual.get(name)}
        value = {"policy": value.name} | others
    return " ".join(f"{name}={x}" for name, x in value.items())


@pytest.mark.parametrize(("name", "policy", "given"), CASES, ids=label)
def test_it_compiles(name, policy, given, calls: dict[str, Call], monkeypatch: pytest.MonkeyPatch):
    settings: dict[str, Any] = {"dense_layers": 1, **given}
    model = random_model(name, settings.pop("dtype", "float32"))
    asked = {key: settings.pop(key) for key in ("prefix", "batch") if key in settings}
    made = Engine(model, policy=policy, **settings)
    made.generate(RAGGED, max_new_tokens=8, **asked)
    assert {"embed", "keep"} <= {call.name for call in calls.values()}
    for call in list(calls.values()):
        compile_for_gpu(call.program, *call.arguments, keywords=call.keywords)
    monkeypatch.setattr(cuda, "in_use", lambda: True)
    by_kernels = steps(dataclasses.replace(made.decoder, transfer=Transfer("cuda")))
    again = {
        name: [call for call in calls.values() if call.name == name]
        for name in ("fused", "checked", "read_layer")
    }
    assert again["fused"] or again["checked"] or made.runtime.settings.schedule == "layerwise"
    for name in ("fused", "checked"):
        for call in again[name]:
            step = getattr(by_kernels, name)
            compile_for_gpu(step, *call.arguments, keywords=call.keywords)
    if model.dtype.itemsize == 2:
        with sp.cudnn_attention():
            hosted = {call.arguments[3] is not None for call in again["read_layer"]}
            assert hosted == {False, True}
            for call in again["read_layer"]:
                chunk = read_layer.compile(made.decoder)  # traced again
                program = compile_for_gpu(chunk, *call.arguments, keywords=call.keywords)
                assert "__cudnn$fmha" in program.hlo
