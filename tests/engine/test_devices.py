"""Several devices: sequences and KV heads divided over a mesh give the result of one device.

The number of CPU devices is set before JAX starts, so this is a separate process.
"""

import os

import pytest
from runtime import random_model
from tiny import ROOT, python, refuses

from infinigen_jax.cache.host_array import checked_mesh, default_mesh

PROGRAM = """
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
    done = python("-c", PROGRAM, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}", XLA_FLAGS=flags)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_mesh_that_does_not_fit_is_refused():
    heads = random_model("gqa").config.num_kv_heads
    assert checked_mesh(None, heads) is default_mesh()
    wrong = default_mesh().__class__(default_mesh().devices, ("model", "data"))
    refuses("axes", checked_mesh, wrong, heads)
