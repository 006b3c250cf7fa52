"""Plans: the bytes allocated later, the advice, and the command line."""

import copy
import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinigen_jax import plan
from infinigen_jax.cache.layers import DenseLayer, Resident
from infinigen_jax.checkpoint.hf_folder import read_config
from infinigen_jax.cli.options import make_engine, make_policy
from infinigen_jax.loading import load as checkpoint
from infinigen_jax.machine.memory_limits import available_host_bytes, tree_bytes
from infinigen_jax.messages import format_bytes
from infinigen_jax.planner import advice, bandwidths
from infinigen_jax.planner.forecast import Forecast, Machine, Planner, conversion_of
from infinigen_jax.planner.traffic import ACCEPTED, HIT_RATE

GIB = 1 << 30
HERE = Machine(None, 64 * GIB, 1e10, 2e9)
LARGE_GPU = Machine(80 * GIB, 256 * GIB, 2e12, 5e10)
SMALL_GPU = dataclasses.replace(LARGE_GPU, device_memory=12 * GIB)  # less than the weights
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


@functools.cache
def traced(folder: Path, separate: bool, *options: str) -> Planner:
    """Return a planner of a machine of this kind; shapes are traced once."""
    arguments = parsed(*options)
    dtype = jnp.dtype("bfloat16" if separate else "float32")
    _, config = read_config(folder)
    conversion, policy = conversion_of(folder, config), make_policy(arguments)
    machine = LARGE_GPU if separate else HERE
    return Planner(config, dtype, conversion, policy, arguments, machine)


def planner(folder: Path, machine: Machine, *options: str) -> Planner:
    made = copy.copy(traced(folder, machine.separate, *options))
    made.machine = machine
    return made


def forecast(folder: Path, machine: Machine, *options: str, context: int = 4096) -> Forecast:
    made = planner(folder, machine, *options)
    return made.forecast(made.asked, 1, context)


def seconds(forecast: Forecast | None) -> float:
    assert forecast is not None and forecast.seconds is not None
    return forecast.seconds


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("big")
    (path / "config.json").write_text(json.dumps(BIG))
    return path


BYTES = [
    (),
    ("--dense-layers=0", "--hot-set=2", "--rows=int8"),
    ("--policy=infinigen-paper:index_dtype=float32",),
    ("--policy=full", "--dense-layers=9"),
    ("--policy=quest",),
    ("--pool-tokens=128", "--policy=infinigen:window=32"),
]


@pytest.mark.usefixtures("shallow")
@pytest.mark.parametrize(
    ("name", "options"),
    [*(("books-llama", options) for options in BYTES), ("tiny-opt", BYTES[1])],
)
def test_the_bytes_are_those_that_are_allocated(name, options):
    model = checkpoint.load(checkpoint.embedded(name), "float32")
    arguments = parsed(*options)
    engine = make_engine(model, make_policy(arguments), arguments)
    run = engine.start([[3] * 200, [5] * 70], max_new_tokens=56)
    planned = planner(checkpoint.embedded(name), HERE, *options)
    forecast = planned.forecast(planned.asked, 2, 256)
    assert forecast.weights == tree_bytes(model.params)
    assert forecast.speculation == tree_bytes(engine.runtime.weights.policy)
    kept = [model.bases, model.svd_bases, [a.basis for a in model.ahead or ()]]
    assert forecast.bases == tree_bytes(kept)
    cache, expected = run.cache, forecast.plan
    assert expected.host_cache == tree_bytes(cache.host)
    assert expected.index == tree_bytes(cache.states)
    assert expected.hot + expected.pool == tree_bytes((cache.hot, cache.pool))
    dense = [local for local in cache.local if isinstance(local, DenseLayer)]
    assert expected.dense_cache == tree_bytes(dense)
    assert expected.resident == tree_bytes([x for x in cache.local if isinstance(x, Resident)])
    assert expected == max(run.phases, key=lambda phase: phase.workspace)


def test_the_whole_cache_goes_to_a_device_that_has_room(folder):
    found = advice.advise(planner(folder, LARGE_GPU), 1, 8192)
    assert found.full.fits and seconds(found.full) < seconds(found.asked)
    assert found.best is not None and found.best.settings.dense_layers == 32
    assert "fits and is faster" in plan.verdict(found)[0]
    given = advice.advise(planner(folder, LARGE_GPU, "--dense-layers=3"), 1, 8192)
    assert given.best is not None and given.best.settings.dense_layers == 3


@pytest.mark.parametrize("machine", [HERE, dataclasses.replace(LARGE_GPU, host_memory=64 * GIB)])
def test_layers_that_have_to_be_dense_stay_so(machine):
    """A conversion has found two of tiny-opt; with none a step would be faster."""
    made = planner(checkpoint.embedded("tiny-opt"), machine)
    assert made.asked.dense_layers == 2
    best = advice.best_settings(made, 1, 1024)
    assert best is not None and (best.settings.dense_layers or 0) >= 2
    none = dataclasses.replace(best.settings, dense_layers=0)
    if machine is HERE:
        assert seconds(made.forecast(none, 1, 1024)) < seconds(best)


def test_weights_go_to_the_host_only_where_they_have_to(folder):
    made = planner(folder, SMALL_GPU)
    found = advice.advise(made, 8, 2048)
    best = found.best
    assert best is not None and best.settings.weights == "host" and best.fits
    assert (best.settings.dense_layers or 0) >= 2
    assert "--weights host" in plan.verdict(found)[-1]
    given = advice.best_settings(planner(folder, SMALL_GPU, "--weights=host"), 8, 2048)
    assert given is not None and given.settings == best.settings
    made.machine = dataclasses.replace(SMALL_GPU, device_memory=96 * GIB)
    roomy = advice.advise(made, 8, 2048)
    assert roomy.best is not None and roomy.best.settings.weights == "device"
    assert "--weights" not in "".join(plan.verdict(roomy))
    # The most that fits is computed with weights on the host, unless they must stay.
    made.machine = dataclasses.replace(SMALL_GPU, device_memory=5 * GIB)
    assert advice.fits(made, 1, 2048) and not advice.fits(made, 16, 2048)
    staying = planner(folder, made.machine, "--weights=device")
    assert not advice.fits(staying, 1, 2048) and advice.best_settings(staying, 8, 2048) is None


def test_weights_in_host_memory(folder):
    here, there = (forecast(folder, SMALL_GPU, f"--weights={at}") for at in ("device", "host"))
    assert there.fits and not here.fits
    assert here.weights == there.weights + there.weights_on_host
    arriving = 2 * there.weights_on_host // 32
    assert there.prefill - here.prefill == there.decode - here.decode == arriving
    assert there.host == there.plan.host_cache + there.weights_on_host
    assert seconds(there) > there.weights_on_host / 5e10
    assert there.traffic.link == here.traffic.link
    assert there.traffic.brought == there.weights_on_host and not here.traffic.brought
    assert not any("weights from" in line for line in plan.table(here))
    lines = dict(line.strip().split("  ", 1) for line in plan.table(there) if " from the " in line)
    assert lines.keys() == {"rows from the host", "weights from the host"}
    for name, count in zip(lines, (there.traffic.link, there.weights_on_host), strict=True):
        assert format_bytes(count) in lines[name] and "at 50.0 GB/s" in lines[name]


def test_drafts_have_a_copy_of_the_weights(folder):
    """By default in int8, where the model's weights are in host memory."""
    plain, int8, int4 = (
        forecast(folder, SMALL_GPU, "--weights=host", *options)
        for options in ((), ("--lossless",), ("--lossless", "--draft-weights=int4"))
    )
    assert plain.drafts == 0 and not any("of drafts" in line for line in plan.table(plain))
    queries = BIG["num_hidden_layers"] * BIG["hidden_size"] ** 2 * 2  # stay on the device
    for drafting, share in ((int8, 0.5625), (int4, 0.375)):  # of bfloat16, with the groups' scales
        copied = drafting.drafts / (plain.weights_on_host + queries)
        assert copied == pytest.approx(share, rel=1e-3)
        more = drafting.plan.device - plain.plan.device
        assert drafting.device == plain.device + drafting.drafts + more
        assert more > 0 and drafting.host > plain.host  # drafted tokens, and room for them
        line = next(line for line in plan.table(drafting) if "weights of drafts" in line)
        assert format_bytes(drafting.drafts) in line


def test_layers_that_attend_to_all_rows_find_none_on_the_device(folder, caplog):
    """The hot set holds selected rows only. The machine that plans needs no GPU."""
    options = ("--dense-layers=0", "--transfer=cuda")
    full = forecast(folder, LARGE_GPU, *options, "--policy=full", context=65536)
    policy = "--policy=infinigen:streamed_layers=1"
    some = forecast(folder, LARGE_GPU, *options, policy, context=65536).traffic
    assert some.whole == full.traffic.link // BIG["num_hidden_layers"]
    chosen = some.attended - some.whole
    assert chosen > 0 and some.link == some.whole + int(chosen * (1 - HIT_RATE))
    assert not caplog.records


def test_lossless_is_forecast_where_a_link_carries_the_cache(folder):
    """A round moves the full cache once; in one fast memory, only small weights make drafts pay."""

    def on_link(*options: str, machine: Machine = LARGE_GPU, context: int = 65536) -> Forecast:
        return forecast(folder, machine, *options, context=context)

    found = on_link("--dense-layers=0")
    rounds = found.lossless
    assert rounds.full == pytest.approx(found.plan.host_cache / 5e10, rel=0.01)
    assert 1 <= rounds.drafted <= 15
    tokens = sum(ACCEPTED**k for k in range(rounds.drafted + 1))
    drafts = rounds.drafted * seconds(found)
    assert rounds.seconds == pytest.approx((drafts + rounds.full) / tokens)
    (line,) = plan.exact_tokens(found)
    assert "--lossless takes" in line and f"{1e3 * rounds.full:.2f} ms" in line

    # The window limits drafts, and small rows must not leave it.
    narrow = on_link("--dense-layers=0", "--policy=infinigen:window=2").lossless
    assert narrow is not None and 1 <= narrow.drafted <= 2
    assert on_link("--dense-layers=0", "--policy=infinigen-paper", "--rows=int8").lossless is None
    streamed = on_link("--dense-layers=0", "--weights=host").lossless
    assert streamed is not None and streamed.full / streamed.seconds > 3
    fast = Machine(None, 256 * GIB, 2e12, 2e12)
    small = on_link("--dense-layers=0", "--lossless", machine=fast, context=256)
    assert small.drafts > 0 and small.lossless is not None and small.lossless.drafted > 0
    settings = "--dense-layers=0", "--lossless", "--draft-weights=none"
    short = on_link(*settings, machine=fast, context=256)
    assert short.drafts == 0 and short.lossless is not None and short.lossless.drafted == 0
    assert "do not pay" in plan.exact_tokens(short)[0]
    for options in (["--policy=full"], ["--dense-layers=0", "--pool-tokens=4096"]):
        assert plan.exact_tokens(on_link(*options)) == []
    assert on_link(machine=Machine(None, 256 * GIB, None, None)).lossless is None


def test_lossless_is_not_recommended_where_its_drafts_do_not_fit(folder):
    """With weights on the host, drafts take a copy of them on the device."""
    plain = forecast(folder, LARGE_GPU, "--weights=host").device
    drafting = forecast(folder, LARGE_GPU, "--weights=host", "--lossless").device
    assert plain < drafting - 1
    for memory, offered in ((drafting, True), (drafting - 1, False)):
        tight = dataclasses.replace(LARGE_GPU, device_memory=memory)
        found = forecast(folder, tight, "--weights=host")
        assert (found.lossless is not None) is offered


def test_a_prompt_that_takes_too_much_is_read_in_shorter_chunks(folder):
    """Before rows lose precision; and the workspace of its layers shrinks by it."""
    options = ("--dense-layers=0", "--hot-set=2")
    roomy = planner(folder, LARGE_GPU, *options)
    whole = roomy.forecast(roomy.asked, 4, 65536)
    assert whole.prefill > whole.decode and whole.settings.prefill_chunk is None
    roomy.machine = dataclasses.replace(LARGE_GPU, device_memory=whole.device - whole.prefill // 3)
    found = advice.advise(roomy, 4, 65536)
    best = found.best
    assert not found.asked.fits and best is not None and best.settings.rows == "auto"
    assert best.settings.prefill_chunk in advice.SMALLER_CHUNKS and best.chunk < whole.chunk
    assert f"--prefill-chunk {best.settings.prefill_chunk}" in plan.verdict(found)[-1]
    given = planner(folder, roomy.machine, *options, "--prefill-chunk=2048")
    assert advice.choices(given)["prefill_chunk"] == [2048]


def test_a_small_host_takes_small_rows(folder):
    machine = dataclasses.replace(LARGE_GPU, host_memory=9 * GIB)
    best = advice.best_settings(planner(folder, machine, "--dense-layers=2"), 8, 16384)
    assert best is not None and best.settings.rows == "int8"
    assert best.plan.host_cache <= 9 * GIB


@settings(max_examples=4)
@given(device=st.integers(1, 200), host=st.integers(1, 200), batch=st.integers(1, 8))
def test_what_is_recommended_fits(folder, device, host, batch):
    made = planner(folder, Machine(device * GIB, host * GIB, 2e12, 5e10))
    found = advice.advise(made, batch, 4096)
    if found.best is None:
        assert not found.asked.fits
        assert found.most_batch is not None and found.most_batch < batch
        assert found.most_context is not None and found.most_context < 4096
        return
    assert found.best.fits
    assert found.best.plan.dense_cache >= found.asked.plan.dense_cache
    assert not found.asked.fits or seconds(found.best) <= seconds(found.asked)
    assert not found.asked.fits or found.best.settings.weights == "device"
    # More memory never makes it slower.
    made.machine = Machine(2 * device * GIB, 2 * host * GIB, 2e12, 5e10)
    better = advice.best_settings(made, batch, 4096)
    if better.settings.rows == found.best.settings.rows:
        assert seconds(better) <= seconds(found.best)


def test_the_xla_transfer_has_no_hot_set(folder):
    sizes = [planner(folder, SMALL_GPU, *given).asked.hot_set for given in ([], ["--transfer=xla"])]
    assert sizes == [2.0, 0.0]


@pytest.fixture
def planned(folder, command):
    """Return `planned(*options)`, which gives the text of a plan for a long context."""

    def call(*options: Any) -> str:
        given = ("--model", folder, "--context", "65536", "--host-memory", "256")
        status, text, errors = command(plan.main, *given, *options)
        assert (status, errors) == (0, "")
        return text

    return call


def test_command_line(planned, tmp_path):
    out = tmp_path / "plan.json"
    assert "recommended: " in planned(*GPU, "--json", out)
    record = json.loads(out.read_text())
    assert record["asked"]["fits"] and record["context"] == 65536
    rows = 30 * 8 * 65536 * 128 * 2 * 2
    assert record["asked"]["plan"]["host_cache"] == rows
    machine = record["asked"]["machine"]
    assert machine["copy_bandwidth"] == 50e9 and machine["device_memory"] == 72 * 2**30
    assert record["policy_settings"]["budget"] == 0.1 and record["pool"] is None
    planned(*GPU, "--json", out, "--budget", "0.2", "--alpha", "inf", "--pool-tokens", "50%")
    record = json.loads(out.read_text())
    settings = record["policy_settings"]
    assert (settings["budget"], settings["alpha"], record["pool"]["share"]) == (0.2, "inf", 0.5)
    text = planned(*GPU[2:], "--device-memory", "2")
    assert "too much" in text and "nothing fits" in text


@pytest.mark.parametrize("option", [None, "--device-bandwidth", "--copy-bandwidth"])
def test_bytes_need_no_bandwidths(planned, tmp_path, option):
    """Times need both bandwidths; sizes of an absent device need none."""
    known = [] if option is None else [option, "100"]
    out = tmp_path / "plan.json"
    text = planned("--device-memory", "80", "--json", out, *known)
    assert " ms" not in text and "recommended" not in text and "faster" not in text
    (line,) = [line for line in text.splitlines() if line.startswith("times are left out")]
    for other in ("--device-bandwidth", "--copy-bandwidth"):
        assert (other in line) == (other != option)
    assert "at the peak" in text and "fits: as it is, --hot-set 2 --rows auto" in text
    assert "2 dense layers and equal budgets are assumed" in text
    assert "full cache on the device fits: --dense-layers 32" in text
    record = json.loads(out.read_text())
    asked = record["asked"]
    assert asked["fits"] and asked["device"] > 0 and record["recommended"] == asked
    assert all(record[name]["seconds"] is None for name in ("asked", "full_on_device"))
    rates = {"--device-bandwidth": "memory_bandwidth", "--copy-bandwidth": "copy_bandwidth"}
    for name, rate in rates.items():
        assert asked["machine"][rate] == (1e11 if name == option else None)


def test_what_fits_without_bandwidths(planned):
    """The nearest settings that fit; else the largest batch and context that would."""
    text = planned("--device-memory", "21.7")
    assert "too much" in text
    assert "would fit: --hot-set 0 --rows auto: " in text
    text = planned("--batch", "9", "--device-memory", "15.5")
    assert re.search(r"nothing fits: at most \d+ tokens of context or [1-8] of the sequences", text)
    assert " ms" not in text


def test_nothing_fits_a_pool_of_a_share(command):
    """The search for a fitting context also tries ones that are too short for the pool."""
    options = ("--context", "1024", "--pool-tokens", "10%", *GPU, "--device-memory", "0.01")
    status, text, _ = command(plan.main, *options)
    assert status == 0 and "nothing fits, whatever the context: try --weight-dtype" in text


def test_options_without_effect_are_named(folder, command):
    options = ("--model", folder, "--context", "1024", "--policy", "full", "--budget", "0.3", *GPU)
    status, _, errors = command(plan.main, *options)
    assert (status, errors) == (0, "--budget: no effect with --policy full\n")


def test_here_and_now(command, monkeypatch):
    """The embedded model on this machine, with its bandwidths measured."""
    for name, size in (("memory_read_bandwidth", 1 << 24), ("gather_bandwidth", 1 << 22)):
        measure = functools.partial(getattr(bandwidths, name), size)
        monkeypatch.setattr(bandwidths, name, measure)
    status, text, errors = command(plan.main, "--context", "512")
    assert status == 0 and errors == ""
    assert "fits" in text and " ms" in text and "GB/s" in text
    machine = plan.this_machine(parsed())
    assert not machine.separate or jax.default_backend() != "cpu"
    assert abs(machine.host_memory - available_host_bytes()) < GIB
