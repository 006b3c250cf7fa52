"""Plans: the bytes of what is then allocated, the advice, and the command line."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import only

from infinigen_jax import advice, checkpoint, plan
from infinigen_jax.cache import DenseLayer, Resident
from infinigen_jax.convert.reader import read_config
from infinigen_jax.forecast import Machine, Planner, conversion_of, tree_bytes
from infinigen_jax.memory_limits import available_host_bytes
from infinigen_jax.options import make_engine, make_policy
from infinigen_jax.sampling import Sampling

GIB = 1 << 30
HERE = Machine(None, 64 * GIB, 1e10, 2e9)
GPU = ("--device-memory", "80", "--device-bandwidth", "2000", "--copy-bandwidth", "50")
BIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}


def parsed(*options: str, context: int = 256):
    return plan.build_parser().parse_args(["--context", str(context), *options])


def planner(folder: Path, machine: Machine, *options: str) -> Planner:
    arguments = parsed(*options)
    dtype = jnp.dtype("bfloat16" if machine.separate else "float32")
    _, config = read_config(folder)
    return Planner(
        config, dtype, conversion_of(folder, config), make_policy(arguments), arguments, machine
    )


@functools.cache
def big(tmp: Path) -> Path:
    tmp.mkdir(exist_ok=True)
    (tmp / "config.json").write_text(json.dumps(BIG))
    return tmp


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with nothing but a config.json."""
    return big(tmp_path_factory.mktemp("big"))


@pytest.mark.parametrize("name", checkpoint.EMBEDDED)
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--dense-layers=0", "--hot-set=2", "--rows=int8"),
        ("--policy=infinigen-paper", "--index-dtype=float32"),
        ("--policy=full", "--dense-layers=9"),
        ("--policy=quest",),
        ("--pool-tokens=128",),
    ],
)
def test_the_bytes_are_those_that_are_allocated(name, options):
    model = checkpoint.load(checkpoint.embedded(name), "float32")
    arguments = parsed(*options)
    engine = make_engine(model, make_policy(arguments), arguments)
    run = engine.start([[3] * 200, [5] * 70], 56, Sampling())
    planned = planner(checkpoint.embedded(name), HERE, *options)
    forecast = planned.forecast(planned.asked, 2, 256)
    assert forecast.weights == tree_bytes(model.params)
    assert forecast.speculation == tree_bytes(engine.weights.policy)
    kept = [model.bases, model.svd_bases, [a.basis for a in model.ahead or ()]]
    assert forecast.bases == tree_bytes(kept)
    cache, expected = run.cache, forecast.plan
    assert expected.host_cache == tree_bytes(cache.host)
    assert expected.index == tree_bytes(cache.states)
    assert expected.hot + expected.pool == tree_bytes((cache.hot, cache.pool))
    dense = [local for local in cache.local if isinstance(local, DenseLayer)]
    assert expected.dense_cache == tree_bytes(dense)
    assert expected.resident == tree_bytes([x for x in cache.local if isinstance(x, Resident)])
    assert expected == run.plan


def test_the_whole_cache_goes_to_a_device_that_has_room(folder):
    machine = Machine(80 * GIB, 256 * GIB, 2e12, 5e10)
    found = advice.advise(planner(folder, machine), 1, 8192)
    assert found.full.fits and found.full.seconds < found.asked.seconds
    assert found.best is not None and found.best.settings.dense_layers == 32
    assert "fits and is faster" in advice.verdict(found)[0]
    given = advice.advise(planner(folder, machine, "--dense-layers=3"), 1, 8192)
    assert given.best is not None and given.best.settings.dense_layers == 3


def test_a_slow_bus_makes_for_a_smaller_budget(folder):
    chosen = ("--dense-layers=2",)
    slow = advice.best_settings(
        planner(folder, Machine(80 * GIB, 99 * GIB, 2e12, 1e9), *chosen), 1, 16384
    )
    fast = advice.best_settings(
        planner(folder, Machine(80 * GIB, 99 * GIB, 2e12, 1e12), *chosen), 1, 16384
    )
    assert slow is not None and fast is not None
    assert slow.settings.budget == 0.02 and fast.settings.budget == 0.1
    assert slow.seconds > fast.seconds
    same = planner(folder, Machine(80 * GIB, 99 * GIB, 2e12, 1e9), *chosen, "--budget=0.08")
    kept = advice.best_settings(same, 1, 16384)
    assert kept is not None and kept.settings.budget == 0.08


def test_weights_in_host_memory(folder):
    """Of a model that the device has no room for."""
    machine = Machine(12 * GIB, 256 * GIB, 2e12, 5e10)
    here, there = (planner(folder, machine, f"--weights={place}") for place in ("device", "host"))
    here, there = (made.forecast(made.asked, 1, 4096) for made in (here, there))
    assert there.fits and not here.fits
    assert here.weights == there.weights + there.weights_on_host
    arriving = 2 * there.weights_on_host // 32
    assert there.prefill - here.prefill == there.decode - here.decode == arriving
    assert there.host == there.plan.host_cache + there.weights_on_host
    assert there.seconds > there.weights_on_host / machine.copy_bandwidth


def test_a_prompt_that_takes_too_much_is_read_in_shorter_chunks(folder):
    """Before rows lose precision; and the workspace of its layers shrinks by it."""
    options = ("--dense-layers=0", "--hot-set=2")
    roomy = planner(folder, Machine(80 * GIB, 256 * GIB, 2e12, 5e10), *options)
    whole = roomy.forecast(roomy.asked, 4, 65536)
    assert whole.prefill > whole.decode and whole.settings.prefill_chunk is None
    roomy.machine = Machine(whole.device - whole.prefill // 3, 256 * GIB, 2e12, 5e10)
    found = advice.advise(roomy, 4, 65536)
    best = found.best
    assert not found.asked.fits and best is not None and best.settings.rows == "auto"
    assert best.settings.prefill_chunk in advice.SMALLER_CHUNKS and best.chunk < whole.chunk
    assert f"--prefill-chunk {best.settings.prefill_chunk}" in advice.verdict(found)[-1]
    given = planner(folder, roomy.machine, *options, "--prefill-chunk=2048")
    assert list(advice.chunk_choices(given)) == [2048]


def test_a_small_host_takes_small_rows(folder):
    machine = Machine(80 * GIB, 9 * GIB, 2e12, 5e10)
    best = advice.best_settings(planner(folder, machine, "--dense-layers=2"), 8, 16384)
    assert best is not None and best.settings.rows == "int8"
    assert best.plan.host_cache <= 9 * GIB


@settings(max_examples=10)
@given(device=st.integers(1, 200), host=st.integers(1, 200), batch=st.integers(1, 8))
def test_what_is_recommended_fits(folder, device, host, batch):
    machine = Machine(device * GIB, host * GIB, 2e12, 5e10)
    made = _planner(folder, machine)
    found = advice.advise(made, batch, 4096)
    if found.best is None:
        assert not found.asked.fits
        assert found.most_batch is not None and found.most_batch < batch
        assert found.most_context is not None and found.most_context < 4096
        return
    assert found.best.fits
    assert not found.asked.fits or found.best.seconds <= found.asked.seconds
    # More memory never makes it slower.
    more = Machine(2 * device * GIB, 2 * host * GIB, 2e12, 5e10)
    better = advice.best_settings(_planner(folder, more), batch, 4096)
    assert better is not None
    if better.settings.rows == found.best.settings.rows:
        assert better.seconds <= found.best.seconds


_made: dict[Path, Planner] = {}


def _planner(folder: Path, machine: Machine) -> Planner:
    """Shapes are traced once for all examples."""
    if folder not in _made:
        _made[folder] = planner(folder, machine)
    made = _made[folder]
    made.machine = machine
    return made


def test_command_line(folder, tmp_path, command):
    out = tmp_path / "plan.json"
    arguments = ("--model", folder, "--context", "65536", *GPU, "--host-memory", "256")
    status, text, errors = command(plan.main, *arguments, "--json", out)
    assert status == 0 and errors == "" and "recommended: " in text
    record = json.loads(out.read_text())
    assert record["asked"]["fits"] and record["context"] == 65536
    rows = 30 * 8 * 65536 * 128 * 2 * 2
    assert record["asked"]["plan"]["host_cache"] == rows
    assert record["asked"]["machine"]["copy_bandwidth"] == 50e9
    small = ("--model", folder, "--context", "65536", *GPU[2:], "--device-memory", "2")
    status, text, _ = command(plan.main, *small)
    assert status == 0 and "too much" in text and "nothing fits" in text


def test_here_and_now(command, monkeypatch):
    """The embedded model on this machine, with its bandwidths measured."""
    from infinigen_jax import bandwidths

    reads = functools.partial(bandwidths.memory_read_bandwidth, 1 << 24)
    monkeypatch.setattr(bandwidths, "memory_read_bandwidth", reads)
    gathers = functools.partial(bandwidths.gather_bandwidth, 1 << 22)
    monkeypatch.setattr(bandwidths, "gather_bandwidth", gathers)
    status, text, errors = command(plan.main, "--context", "512")
    assert status == 0 and errors == ""
    assert "fits" in text and " ms" in text and "GB/s" in text
    machine = plan.this_machine(parsed())
    assert not machine.separate or jax.default_backend() != "cpu"
    assert abs(machine.host_memory - available_host_bytes()) < GIB


@pytest.mark.parametrize(
    "options, message",
    [
        (("--context", "0"), "--context 0"),
        (("--context", "9999"), "--context 9999: the model has 1024 positions"),
        (("--context", "64", "--batch", "0"), "--batch 0"),
        (("--context", "64", "--device-memory", "-1"), "--device-memory -1"),
        (("--context", "64", "--device-memory", "8"), "--device-bandwidth"),
        (("--context", "64", "--host-memory", "nan"), "--host-memory nan"),
        (("--context", "64", "--rows", "int3", *GPU), "--rows int3"),
        (("--context", "64", "--dense-layers", "-1", *GPU), "--dense-layers -1"),
        (("--context", "64", "--model", "/nowhere"), "/nowhere: no such folder"),
        (("--context", "64", "--json", "/nowhere/x"), "--json"),
        (("--context", "64", "--dtype", "int8", *GPU), "--dtype int8"),
    ],
)
def test_bad_options(options, message, command, tmp_path):
    status, text, errors = command(plan.main, *options)
    assert status == 2 and text == "" and errors.count("\n") == 1
    assert errors.startswith("error: ") and message in errors
    assert only(tmp_path) == []
