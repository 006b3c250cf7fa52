"""The work of a start: tracing of many layers, savings of a second process, several devices."""

import functools
import os
from collections.abc import Callable

import pytest
from runtime import COMMON, RAGGED, SPARSE, random_model, tokens_of
from tiny import ROOT, python, refuses

from infinigen_jax import Engine, Model
from infinigen_jax.cache.host_array import checked_mesh, default_mesh
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.decode.steps import steps
from infinigen_jax.models import config_from_hf, random_params
from infinigen_jax.prefill import compiled


def deep(layers: int) -> Model:
    sizes = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": layers}
    config = config_from_hf(COMMON | sizes)
    return Model.from_params(config, random_params(config, "float32"), "float32")


def test_a_kind_of_layer_is_traced_once_however_many_there_are(monkeypatch):
    traces: list[str] = []

    def counted(function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*arguments, **keywords):
            traces.append(function.__name__)
            return function(*arguments, **keywords)

        return call

    # Nothing is loaded instead.
    monkeypatch.setattr("infinigen_jax.programs.program.program_folder", lambda: None)
    monkeypatch.setattr(Decoder, "decode_layer", counted(Decoder.decode_layer))
    monkeypatch.setattr(compiled, "layer_over", counted(compiled.layer_over))
    engine = Engine(deep(5), policy=SPARSE, dense_layers=1)
    run = engine.start(RAGGED, max_new_tokens=3)
    parts = run.cache.parts(run.decoder.policy.observes)
    steps(run.decoder).fused.trace(engine.runtime.weights, *parts, run.drawn)
    # Steps have layers on the device, on the host, and on the host without a layer after it.
    assert (traces.count("layer_over"), traces.count("decode_layer")) == (2, 3)


PROGRAM = """
import jax
from test_start import Decoder, start

jax.config.update("jax_default_matmul_precision", "highest")
decode_layer, traces = Decoder.decode_layer, []
Decoder.decode_layer = lambda *given: traces.append(0) or decode_layer(*given)
print(start(), len(traces))
"""


def start() -> list[list[int]]:
    return tokens_of(Engine(deep(1), policy=SPARSE, dense_layers=0), new=3)


def test_a_second_process_traces_no_step(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    tokens = start()
    folders = ROOT, ROOT / "tests", ROOT / "tests/engine"
    done = python("-c", PROGRAM, PYTHONPATH=":".join(map(str, folders)))
    assert (done.returncode, done.stdout) == (0, f"{tokens} 0\n"), done.stderr[-2000:]


DEVICES = """
import jax
import numpy as np
import pytest
from infinigen_jax.engine.engine import Engine
from infinigen_jax.errors import InputError
from infinigen_jax.machine.memory_limits import pinned_bytes_in_use
from infinigen_jax.policies import H2O, Full, InfiniGen
from infinigen_jax.settings.pool import Pool
from runtime import random_model

model, rng = random_model("gqa"), np.random.default_rng(0)
prompts = [[int(t) for t in rng.integers(3, 90, n)] for n in (60, 47, 72, 33)]
ahead = InfiniGen(budget=0.2, window=8, query="plain")
cases = {
    "own query": (InfiniGen(budget=0.2, window=8), {"rows": "int8", "prefill_chunk": 64}),
    "hot set": (ahead, {"dense_layers": 1, "hot_set": 2.0}),
    "pool": (ahead, {"dense_layers": 0, "pool": Pool(tokens=40), "weights": "host"}),
    "streamed": (Full(), {"schedule": "layerwise"}),
    "observed": (H2O(budget=0.2, window=8), {}),
}
for name, (policy, settings) in cases.items():
    found = []
    for shape in ((1, 1), (2, 2)):
        mesh = jax.make_mesh(shape, ("data", "model"), devices=jax.devices()[: shape[0] * shape[1]])
        engine = Engine(model, policy=policy, mesh=mesh, **{"dense_layers": 1} | settings)
        found.append(engine.generate(prompts, max_new_tokens=10).tokens)
    assert len(found[0][0]) > 1 and found[0] == found[1], name
    host = engine.start(prompts, max_new_tokens=2).cache.host
    in_use = [pinned_bytes_in_use(device) for device in jax.devices()]
    assert in_use == [pinned_bytes_in_use(device) for device in jax.devices()]
    assert min(in_use) >= host.nbytes // 4
    assert {x.data.shape[1:3] for x in host.addressable_shards} == {(2, 1)}
    assert host.sharding.memory_kind == "pinned_host"
    with pytest.raises(InputError, match="multiple"):
        engine.generate(prompts[:3], max_new_tokens=2)
with pytest.raises(InputError, match="KV heads"):
    Engine(model, mesh=jax.make_mesh((1, 4), ("data", "model")))
"""


@pytest.mark.slow
def test_several_devices_give_the_tokens_of_one():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    done = python("-c", DEVICES, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}", XLA_FLAGS=flags)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_mesh_that_does_not_fit_is_refused():
    heads = random_model("gqa").config.num_kv_heads
    assert checked_mesh(None, heads) is default_mesh()
    wrong = default_mesh().__class__(default_mesh().devices, ("model", "data"))
    refuses("axes", checked_mesh, wrong, heads)
