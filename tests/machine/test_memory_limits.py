"""Memory limits, read from made-up /proc and /sys trees."""

import dataclasses
import os
from pathlib import Path

import jax
import numpy as np
import pytest
from runtime import engine, random_model
from tiny import refuses

from infinigen_jax import InputError, Pool, embedded, load
from infinigen_jax.engine import memory_plan as planning
from infinigen_jax.engine.memory_plan import LENGTHS, MemoryPlan, Remedies, check_memory
from infinigen_jax.loading import room
from infinigen_jax.machine import memory_limits
from infinigen_jax.machine.backend import FRACTIONS, claim_memory
from infinigen_jax.machine.memory_limits import (
    PINNED_POOL_VARIABLE,
    available_device_bytes,
    available_host_bytes,
    note_pinned,
    pinned_bytes_in_use,
    pinned_pool_limit_bytes,
    tree_bytes,
    unused_pinned_bytes,
)
from infinigen_jax.messages import format_bytes
from infinigen_jax.models import blueprint
from infinigen_jax.policies import H2O

GIB = 1 << 30


def meminfo(gibibytes):
    return f"MemTotal: 99999999 kB\nMemAvailable:   {gibibytes * 2**20} kB\n"


@dataclasses.dataclass(frozen=True, eq=False)
class FakeDevice:
    platform: str
    statistics: dict[str, int] | None = None

    def memory_stats(self) -> dict[str, int] | None:
        return self.statistics


GROUP = "sys/fs/cgroup/service"
TREES = {
    "without limits": ({"proc/meminfo": meminfo(8)}, 8 * GIB),
    # The outer group leaves 3 GiB, of which a file cache of 1 GiB can be freed.
    "nested groups of version 2": (
        {
            "proc/meminfo": meminfo(64),
            "proc/self/cgroup": "0::/service/worker\n",
            f"{GROUP}/worker/memory.max": "max\n",
            f"{GROUP}/worker/memory.current": "5\n",
            f"{GROUP}/memory.max": f"{10 * GIB}\n",
            f"{GROUP}/memory.current": f"{8 * GIB}\n",
            f"{GROUP}/memory.stat": f"anon 1\ninactive_file {GIB - 8}\nactive_file 8\n",
        },
        3 * GIB,
    ),
    # The group's path is the outer host's; only the mount exists.
    "a container of version 1": (
        {
            "proc/meminfo": meminfo(64),
            "proc/self/cgroup": "5:cpu:/x\n4:memory,hugetlb:/docker/abc\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{5 * GIB}",
            "sys/fs/cgroup/memory/memory.stat": (
                f"active_file 7\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}\n"
            ),
        },
        GIB,
    ),
    "over the limit": (
        {
            "proc/meminfo": meminfo(64),
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": "10",
            "sys/fs/cgroup/memory.current": "20",
        },
        0,
    ),
}


@pytest.mark.parametrize("name", TREES)
def test_host(name, tmp_path):
    assert available_host_bytes(tmp_path) > 1 << 20  # without /proc, the physical memory
    files, expected = TREES[name]
    for file, text in files.items():
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert available_host_bytes(tmp_path) == expected


def test_device():
    full = {"bytes_limit": 10, "bytes_in_use": 4}
    assert available_device_bytes(FakeDevice("gpu", full)) == 6
    assert available_device_bytes(FakeDevice("gpu", None)) is None
    assert available_device_bytes(FakeDevice("gpu", {"bytes_in_use": 4})) is None
    assert (available_device_bytes(jax.devices("cpu")[0]) or 0) > 1 << 20


def plan_of(default: int = 0, **parts: int) -> MemoryPlan:
    names = (field.name for field in dataclasses.fields(MemoryPlan))
    return MemoryPlan(**(dict.fromkeys(names, default) | parts))


def test_what_does_not_fit_is_refused_with_what_to_lower(monkeypatch):
    """Host memory, the pool of pinned memory, and device memory are checked."""
    monkeypatch.setattr(planning, "available_host_bytes", lambda: 100 * GIB)
    device = FakeDevice("gpu", {"bytes_limit": 10 * GIB, "bytes_in_use": GIB})

    decoder = engine("gqa", dense_layers=1, hot_set=1.0).decoder
    remedies = Remedies(decoder, batch=3)

    def refusal(**parts: int) -> str:
        return refuses("memory", check_memory, plan_of(**parts), device, remedies)

    monkeypatch.setenv(PINNED_POOL_VARIABLE, "80")
    # Copies of prefixes are not pinned.
    assert "110.0 GiB of host memory" in refusal(host_cache=70 * GIB, prefixes=40 * GIB)
    check_memory(plan_of(host_cache=70 * GIB, prefixes=20 * GIB), device, remedies)
    assert "120.0 GiB of host memory" in (message := refusal(host_cache=120 * GIB))
    assert message.endswith(
        "100.0 GiB are available: lower the prompt length, `max_new_tokens` or `batch`, "
        "or use `rows` int8, `pool.tokens` or more `dense_layers`"
    )
    assert refusal(host_cache=90 * GIB).endswith(f"set {PINNED_POOL_VARIABLE}=92")
    with monkeypatch.context() as patch:  # by weights, for instance
        patch.setattr(planning, "pinned_bytes_in_use", lambda device: 60 * GIB)
        message = refusal(host_cache=30 * GIB)
    assert "may take 80.0 GiB, of which 60.0 GiB are in use" in message
    assert message.endswith(f"set {PINNED_POOL_VARIABLE}=92")
    message = refusal(dense_cache=6 * GIB, workspace=4 * GIB)
    assert "10.0 GiB of device memory, and 9.0 GiB are free" in message
    assert message.endswith(
        "lower the prompt length, `max_new_tokens`, `batch`, `dense_layers` or `prefill_chunk`, "
        "or use `weights` host or `pool.tokens`"
    )
    message = refusal(hot=6 * GIB, index=4 * GIB)
    assert "`batch`, `hot_set` or `partial_ratio`, or use" in message


def test_memory_that_jax_keeps_pinned_is_used_again(monkeypatch):
    device, in_use = FakeDevice("gpu"), [0]
    monkeypatch.setattr(memory_limits, "_pinned", 0)
    monkeypatch.setattr(memory_limits, "pinned_bytes_in_use", lambda device: in_use[0])
    for count, unused in ((0, 0), (60, 0), (20, 40), (0, 60), (70, 0), (10, 60)):
        in_use[0] = count
        note_pinned(device)
        assert unused_pinned_bytes(device) == unused
    assert unused_pinned_bytes(jax.devices("cpu")[0]) == 0
    monkeypatch.setenv(PINNED_POOL_VARIABLE, "200")
    monkeypatch.setattr(planning, "available_host_bytes", lambda: 40)
    remedies = Remedies(engine("gqa", dense_layers=1).decoder)
    for _ in range(2):  # a check pins nothing
        check_memory(plan_of(host_cache=100), device, remedies)
        with pytest.raises(InputError, match="101 B of host memory .* 100 B are available"):
            check_memory(plan_of(host_cache=101), device, remedies)


def test_the_share_of_a_gpu_has_one_name(monkeypatch):
    """JAX refuses both names together, and the user's value takes precedence."""
    for given, kept in ((), {FRACTIONS[0]: "0.9"}), (FRACTIONS[1:], {FRACTIONS[1]: "0.5"}):
        for name in FRACTIONS:
            monkeypatch.delenv(name, raising=False)
        for name in given:
            monkeypatch.setenv(name, "0.5")
        claim_memory()
        assert {name: os.environ[name] for name in FRACTIONS if name in os.environ} == kept


def test_remedies_are_options_that_apply():
    plan = plan_of(GIB)

    def of(*given, unified: bool = True, **settings) -> tuple[str, str]:
        remedies = Remedies(engine("gqa", **settings).decoder, *given)
        return remedies.for_host(plan, unified=unified), remedies.for_device(plan)

    host, device = of(LENGTHS, 1, True, rows="int8", weights="host", dense_layers=1, unified=False)
    assert host == (
        "lower the prompt length, `max_new_tokens`, `prefix_bytes` or the number of prompts to 1, "
        "or use `pool.tokens`, more `dense_layers` or `weights` device"
    )
    assert "`weights`" not in device and "`dense_layers`" in device
    host, device = of(policy=H2O(budget=0.2, window=4, sinks=2), pool=None, dense_layers=1)
    assert "`pool.tokens`" not in host + device and "`partial_ratio`" not in device
    host, _ = of(pool=Pool(tokens=50), dense_layers=1)
    assert "`dense_layers`" in host and "`prefill_chunk`" not in host


def test_pinned_pool(monkeypatch):
    monkeypatch.delenv(PINNED_POOL_VARIABLE, raising=False)
    assert pinned_pool_limit_bytes(jax.devices("cpu")[0]) is None
    assert pinned_pool_limit_bytes(FakeDevice("gpu")) == 64 * GIB
    monkeypatch.setenv(PINNED_POOL_VARIABLE, "200")
    assert pinned_pool_limit_bytes(FakeDevice("gpu")) == 200 * GIB


def test_pinned_arrays_are_counted():
    device = jax.devices()[0]
    before = pinned_bytes_in_use(device)
    pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    kept = jax.device_put(np.zeros((3, 5), np.float32), pinned)
    assert pinned_bytes_in_use(device) == before + kept.nbytes
    del kept
    assert pinned_bytes_in_use(device) == before


def test_weights_that_the_host_has_no_room_for(monkeypatch):
    """Two layers' matrices are on the device at a time; the others wait on the host."""
    model = load(embedded("tiny-llama"), weights="host")
    sizes = dict.fromkeys(("device", "pinned_host"), 0)
    for x in jax.tree.leaves(model.params):
        sizes[x.sharding.memory_kind] += x.nbytes
    on_host = sizes["pinned_host"]
    on_device = sizes["device"] + 2 * on_host // model.config.num_layers
    given = Path("folder"), blueprint(model.config, model.dtype)
    monkeypatch.setattr(jax, "devices", lambda: [FakeDevice("gpu")])
    monkeypatch.setattr(room, "available_device_bytes", lambda device: on_device)
    monkeypatch.setattr(room, "available_host_bytes", lambda: on_host)
    assert room.check_room(*given, "host") == 0
    refuses("of memory, .*smaller model or `weights` host", room.check_room, *given, "device")
    monkeypatch.setattr(room, "pinned_pool_limit_bytes", lambda device: on_host - 1)
    with pytest.raises(InputError, match=f"pinned memory.*set {PINNED_POOL_VARIABLE}=3$"):
        room.check_room(*given, "host")
    monkeypatch.setattr(room, "available_host_bytes", lambda: on_host - 1)
    refuses("of host memory, .*use `weight_dtype` int8", room.check_room, *given, "host")
    monkeypatch.setattr(room, "available_device_bytes", lambda device: on_device - 1)
    monkeypatch.setattr(room, "available_host_bytes", lambda: on_host)
    monkeypatch.setattr(room, "pinned_pool_limit_bytes", lambda device: None)
    message = "of memory, .*int8, `weight_dtype` int4 or a smaller model$"
    refuses(message, room.check_room, *given, "host")


@pytest.mark.parametrize("vocabulary", [96, 96000])
@pytest.mark.parametrize("weight_dtype", [None, "int8"])
def test_a_matrix_is_read_before_it_is_small(monkeypatch, tmp_path, weight_dtype, vocabulary):
    """A layer, or the embedding, which is read first and may be larger than all layers."""
    config = dataclasses.replace(random_model("gqa").config, vocab_size=vocabulary)
    read, kept = blueprint(config, "float32"), blueprint(config, "float32", weight_dtype)
    needed = tree_bytes((kept.embedding_shapes, [kept.layer_shapes] * config.num_layers))
    if weight_dtype is not None:
        whole = tree_bytes(kept.embedding_shapes) + tree_bytes(read.embedding_shapes["tokens"])
        needed = max(needed + tree_bytes(read.layer_shapes), whole)
        assert (needed == whole) is (vocabulary > 96)
    monkeypatch.setattr(room, "available_device_bytes", lambda device: needed)
    assert room.check_room(tmp_path, kept, "device") == 0
    monkeypatch.setattr(room, "available_device_bytes", lambda device: needed - 1)
    refuses("of memory", room.check_room, tmp_path, kept, "device")


def test_fewer_layers_are_read_at_a_time_where_memory_is_short():
    shapes = blueprint(random_model("gqa").config, "float32")
    layer = tree_bytes(shapes.layer_shapes)
    left = (None, 100 * layer, 5 * layer, 0)
    assert [room.readers(shapes, each) for each in left] == [4, 4, 2, 1]


@pytest.mark.parametrize("value", ["many", "0", "-1", "1.5"])
def test_pinned_pool_refuses_nonsense(monkeypatch, value):
    monkeypatch.setenv(PINNED_POOL_VARIABLE, value)
    refuses(PINNED_POOL_VARIABLE, pinned_pool_limit_bytes, FakeDevice("gpu"))


BYTES = {0: "0 B", 1023: "1023 B", 1536: "1.5 KiB", 2**20 - 1: "1.0 MiB"}
BYTES |= {64 * GIB: "64.0 GiB", -3 * GIB: "-3.0 GiB", 3 << 50: "3.0 PiB"}


@pytest.mark.parametrize("count, text", BYTES.items())
def test_format_bytes(count, text):
    assert format_bytes(count) == text
