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
from infinigen_jax.policies import POLICIES
from infinigen_jax.prefill.compiled import read_layer
from infinigen_jax.programs.program import Program
from infinigen_jax.transfer import CudaTransfer, XlaTransfer

pytestmark = pytest.mark.slow

INFINIGEN = dataclasses.replace(
    SPARSE, tail=True, partial_ratio=1.0, index_dtype="int4", tail_tokens=8
)
ONE_MEAN = {"tail_tokens": 0}
FULL = POLICIES["full"]()
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    **{f"a model, {name}": (name, INFINIGEN, {}) for name in ("gqa", "opt", "windows", "qwen3")},
    **{
        f"bfloat16, {name}": (name, INFINIGEN, {"dtype": "bfloat16"})
        for name in ("gqa", "opt", "windows")
    },
    **{
        f"policy {name}": ("gqa", kind(), {"dense_layers": int(name == "infinigen-paper")})
        for name, kind in POLICIES.items()
    },
    **{
        f"{setting} {value}": ("gqa", dataclasses.replace(INFINIGEN, **{setting: value}), {})
        for setting, values in {
            "count": ("mean",),
            "query": ("own",),
            "speculate_from": ("resident",),
            "index_dtype": ("float32", "bfloat16"),
            "tail_tokens": (0,),
            "tail": (False,),
        }.items()
        for value in values
    },
    **{
        f"rows {rows}, {what}": ("gqa", policy, {"rows": rows, **settings})
        for rows in ("int8", "int4")
        for what, policy, settings in (
            ("infinigen", INFINIGEN, {}),
            ("hot set", INFINIGEN, {"hot_set": 2.0}),
            ("full", FULL, {"dense_layers": 0}),
        )
    },
    **{
        f"hot set, {name}": ("gqa", INFINIGEN, {"hot_set": 2.0, **settings})
        for name, settings in {"lru": {}, "layerwise": {"schedule": "layerwise"}}.items()
    },
    **{
        f"pool, {name}": (
            "gqa",
            dataclasses.replace(INFINIGEN, **ONE_MEAN),
            {"pool": Pool(share=0.8, eviction=name)},
        )
        for name in ("fifo", "lru", "counter")
    },
    "pool, hot set": (
        "gqa",
        dataclasses.replace(INFINIGEN, **ONE_MEAN),
        {"pool": Pool(share=0.8), "hot_set": 2.0},
    ),
    "pool, full": ("gqa", FULL, {"pool": Pool(share=0.8), "dense_layers": 0}),
    "weights on the host": ("gqa", INFINIGEN, {"weights": "host"}),
    "layerwise": ("gqa", INFINIGEN, {"schedule": "layerwise"}),
    "checked": ("gqa", INFINIGEN, {"check": True}),
    "a shared prefix": ("gqa", INFINIGEN, {"prefix": list(range(3, 43))}),
    "waiting prompts": ("gqa", INFINIGEN, {"batch": 1}),
    "chunks": ("gqa", INFINIGEN, {"prefix": list(range(3, 93)), "prefill_chunk": 64}),
    **{
        f"lossless, {name}": (model, INFINIGEN, {"lossless": True, "draft_tokens": 3, **settings})
        for name, model, settings in (
            ("rows int8", "gqa", {"rows": "int8"}),
            ("weights on the host", "gqa", {"weights": "host"}),
            ("a shared prefix", "gqa", {"prefix": list(range(3, 43))}),
            ("waiting prompts", "gqa", {"batch": 1}),
            ("soft caps", "gemma2", {"dense_layers": 0}),
        )
    },
}


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
    monkeypatch.setattr("infinigen_jax.engine.runtime.make_transfer", lambda name: XlaTransfer())
    return found


@pytest.mark.parametrize("case", CASES)
def test_it_compiles(case: str, calls: dict[str, Call], monkeypatch: pytest.MonkeyPatch):
    name, policy, given = CASES[case]
    settings: dict[str, Any] = {"dense_layers": 1, **given}
    model = random_model(name, settings.pop("dtype", "float32"))
    asked = {key: settings.pop(key) for key in ("prefix", "batch") if key in settings}
    made = Engine(model, policy=policy, **settings)
    made.generate(RAGGED, max_new_tokens=8, **asked)
    assert {"embed", "keep"} <= {call.name for call in calls.values()}
    for call in list(calls.values()):
        compile_for_gpu(call.program, *call.arguments, keywords=call.keywords)
    monkeypatch.setattr(cuda, "in_use", lambda: True)
    by_kernels = steps(dataclasses.replace(made.decoder, transfer=CudaTransfer()))
    again = {
        name: [call for call in calls.values() if call.name == name]
        for name in ("fused", "checked", "read_layer")
    }
    assert again["fused"] or again["checked"] or made.schedule == "layerwise"
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
