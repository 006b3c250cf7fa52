"""Plans: the bytes of what is then allocated, the advice, and the command line."""

import dataclasses
import functools
import json
from pathlib import Path

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
from infinigen_jax.planner import advice
from infinigen_jax.planner.forecast import Forecast, Machine, Planner, conversion_of
from infinigen_jax.planner.traffic import ACCEPTED

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
OPT_30B = {
    "model_type": "opt",
    "hidden_size": 7168,
    "ffn_dim": 28672,
    "num_hidden_layers": 48,
    "num_attention_heads": 56,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
    "do_layer_norm_before": True,
}
SMALL_GPU = Machine(24 * GIB, 256 * GIB, 2e12, 5e10)  # smaller than the weights of OPT-30B


def parsed(*options: str, context: int = 256):
    return plan.build_parser().parse_args(["--context", str(context), *options])


def planner(folder: Path, machine: Machine, *options: str) -> Planner:
    arguments = parsed(*options)
    dtype = jnp.dtype("bfloat16" if machine.separate else "float32")
    _, config = read_config(folder)
    return Planner(
        config, dtype, conversion_of(folder, config), make_policy(arguments), arguments, machine
    )


def seconds(forecast: Forecast | None) -> float:
    assert forecast is not None and forecast.seconds is not None
    return forecast.seconds


@functools.cache
def big(tmp: Path) -> Path:
    tmp.mkdir(exist_ok=True)
    (tmp / "config.json").write_text(json.dumps(BIG))
    return tmp


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with nothing but a config.json."""
    return big(tmp_path_factory.mktemp("big"))


@pytest.fixture(scope="module")
def opt(tmp_path_factory) -> Path:
    """Another, of OPT-30B."""
    folder = tmp_path_factory.mktemp("opt")
    (folder / "config.json").write_text(json.dumps(OPT_30B))
    return folder


BYTES = [
    (),
    ("--dense-layers=0", "--hot-set=2", "--rows=int8"),
    ("--policy=infinigen-paper:index_dtype=float32",),
    ("--policy=full", "--dense-layers=9"),
    ("--policy=quest",),
    ("--pool-tokens=128",),
]


@pytest.mark.usefixtures("shallow")
@pytest.mark.parametrize(
    ("name", "options"),
    [("books-llama", options) for options in BYTES] + [("tiny-opt", x) for x in BYTES[:2]],
)
def test_the_bytes_are_those_that_are_allocated(name, options):
    model = checkpoint.load(checkpoint.embedded(name), "float32")
    arguments = parsed(*options)
    engine = make_engine(model, make_policy(arguments), arguments)
    run = engine.start([[3] * 200, [5] * 70], max_new_tokens=56)
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
    assert found.full.fits and seconds(found.full) < seconds(found.asked)
    assert found.best is not None and found.best.settings.dense_layers == 32
    assert "fits and is faster" in plan.verdict(found)[0]
    given = advice.advise(planner(folder, machine, "--dense-layers=3"), 1, 8192)
    assert given.best is not None and given.best.settings.dense_layers == 3


@pytest.mark.parametrize("machine", [HERE, Machine(80 * GIB, 64 * GIB, 2e12, 5e10)])
def test_layers_that_have_to_be_dense_stay_so(machine):
    """A conversion has found two of tiny-opt; with none a step would be faster."""
    made = planner(checkpoint.embedded("tiny-opt"), machine)
    assert made.asked.dense_layers == 2
    best = advice.best_settings(made, 1, 1024)
    assert best is not None and (best.settings.dense_layers or 0) >= 2
    none = dataclasses.replace(best.settings, dense_layers=0)
    if machine is HERE:
        assert seconds(made.forecast(none, 1, 1024)) < seconds(best)


def test_weights_go_to_the_host_only_where_they_have_to(opt):
    made = planner(opt, SMALL_GPU)
    found = advice.advise(made, 8, 2048)
    best = found.best
    assert best is not None and best.settings.weights == "host" and best.fits
    assert (best.settings.dense_layers or 0) >= 2
    assert "--weights host" in plan.verdict(found)[-1]
    given = advice.best_settings(planner(opt, SMALL_GPU, "--weights=host"), 8, 2048)
    assert given is not None and given.settings == best.settings
    made.machine = dataclasses.replace(SMALL_GPU, device_memory=96 * GIB)
    roomy = advice.advise(made, 8, 2048)
    assert roomy.best is not None and roomy.best.settings.weights == "device"
    assert "--weights" not in "".join(plan.verdict(roomy))
    # What fits at most is counted with them there, unless they are to stay.
    made.machine = dataclasses.replace(SMALL_GPU, device_memory=17 * GIB)
    assert advice.fits(made, 1, 2048) and not advice.fits(made, 16, 2048)
    made.given["weights"] = "device"
    assert not advice.fits(made, 1, 2048)
    assert advice.best_settings(made, 8, 2048) is None


def test_weights_in_host_memory(folder):
    """The device has no room for the model."""
    machine = Machine(12 * GIB, 256 * GIB, 2e12, 5e10)
    here, there = (planner(folder, machine, f"--weights={place}") for place in ("device", "host"))
    here, there = (made.forecast(made.asked, 1, 4096) for made in (here, there))
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
    machine = Machine(12 * GIB, 256 * GIB, 2e12, 5e10)

    def forecast(*options: str) -> Forecast:
        made = planner(folder, machine, "--weights=host", *options)
        return made.forecast(made.asked, 1, 4096)

    plain, int8, int4 = (
        forecast(*options)
        for options in ((), ("--lossless",), ("--lossless", "--draft-weights=int4"))
    )
    assert plain.drafts == 0 and not any("of drafts" in line for line in plan.table(plain))
    queries = BIG["num_hidden_layers"] * BIG["hidden_size"] ** 2 * 2  # stay on the device
    for drafting, share in ((int8, 0.5625), (int4, 0.375)):  # of bfloat16, with the groups' scales
        copied = drafting.drafts / (plain.weights_on_host + queries)
        assert copied == pytest.approx(share, rel=1e-3)
        assert drafting.device == plain.device + drafting.drafts
        line = next(line for line in plan.table(drafting) if "weights of drafts" in line)
        assert format_bytes(drafting.drafts) in line


def test_lossless_is_forecast_where_a_link_carries_the_cache(folder):
    """A round moves the full cache once; where all memory is one and fast, drafts do not pay."""

    def forecast(machine: Machine, *options: str, context: int = 65536) -> Forecast:
        made = planner(folder, machine, *options)
        return made.forecast(made.asked, 1, context)

    link = Machine(80 * GIB, 256 * GIB, 2e12, 5e10)
    found = forecast(link, "--dense-layers=0")
    rounds, seconds = found.lossless, found.seconds
    assert rounds is not None and seconds is not None
    assert rounds.full == pytest.approx(found.plan.host_cache / 5e10, rel=0.01)
    assert 1 <= rounds.drafted <= 15
    tokens = sum(ACCEPTED**k for k in range(rounds.drafted + 1))
    assert rounds.seconds == pytest.approx((rounds.drafted * seconds + rounds.full) / tokens)
    (line,) = plan.exact_tokens(found)
    assert "--lossless takes" in line and f"{1e3 * rounds.full:.2f} ms" in line

    # The window limits drafts, and small rows must not leave it.
    narrow = forecast(link, "--dense-layers=0", "--policy=infinigen:window=2").lossless
    assert narrow is not None and 1 <= narrow.drafted <= 2
    paper = ("--dense-layers=0", "--policy=infinigen-paper", "--rows=int8")
    assert forecast(link, *paper).lossless is None

    streamed = forecast(link, "--dense-layers=0", "--weights=host").lossless
    assert streamed is not None and streamed.full / streamed.seconds > 3
    short = forecast(Machine(None, 256 * GIB, 2e12, 2e12), "--dense-layers=0", context=256)
    assert short.lossless is not None and short.lossless.drafted == 0
    assert "do not pay" in plan.exact_tokens(short)[0]
    for options in (["--policy=full"], ["--dense-layers=0", "--pool-tokens=4096"]):
        assert plan.exact_tokens(forecast(link, *options)) == []
    assert forecast(Machine(None, 256 * GIB, None, None)).lossless is None


def test_lossless_is_not_recommended_where_its_drafts_do_not_fit(folder):
    """With weights on the host, drafts take a copy of them on the device."""
    made = planner(folder, Machine(80 * GIB, 256 * GIB, 2e12, 5e10), "--weights=host")
    drafting = dataclasses.replace(made.asked, lossless=True)
    needed = [made.forecast(settings, 1, 4096).device for settings in (made.asked, drafting)]
    for memory, offered in ((needed[1], True), (needed[1] - 1, False)):
        tight = planner(folder, Machine(memory, 256 * GIB, 2e12, 5e10), "--weights=host")
        assert needed[0] < memory
        assert (tight.forecast(tight.asked, 1, 4096).lossless is not None) is offered


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
    assert f"--prefill-chunk {best.settings.prefill_chunk}" in plan.verdict(found)[-1]
    given = planner(folder, roomy.machine, *options, "--prefill-chunk=2048")
    assert advice.choices(given)["prefill_chunk"] == [2048]


def test_a_small_host_takes_small_rows(folder):
    machine = Machine(80 * GIB, 9 * GIB, 2e12, 5e10)
    best = advice.best_settings(planner(folder, machine, "--dense-layers=2"), 8, 16384)
    assert best is not None and best.settings.rows == "int8"
    assert best.plan.host_cache <= 9 * GIB


@settings(max_examples=4)
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
    assert found.best.plan.dense_cache >= found.asked.plan.dense_cache
    assert not found.asked.fits or seconds(found.best) <= seconds(found.asked)
    assert not found.asked.fits or found.best.settings.weights == "device"
    # More memory never makes it slower.
    more = Machine(2 * device * GIB, 2 * host * GIB, 2e12, 5e10)
    better = advice.best_settings(_planner(folder, more), batch, 4096)
    assert better is not None
    if better.settings.rows == found.best.settings.rows:
        assert seconds(better) <= seconds(found.best)


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


@pytest.mark.parametrize("option", [None, "--device-bandwidth", "--copy-bandwidth"])
def test_bytes_need_no_bandwidths(folder, tmp_path, command, option):
    """Times need both bandwidths; sizes of an absent device need none."""
    known = [] if option is None else [option, "100"]
    out = tmp_path / "plan.json"
    options = ("--model", folder, "--context", "65536", "--host-memory", "256", "--json", out)
    status, text, errors = command(plan.main, *options, "--device-memory", "80", *known)
    assert status == 0 and errors == ""
    assert " ms" not in text and "recommended" not in text and "faster" not in text
    (line,) = [line for line in text.splitlines() if line.startswith("times are left out")]
    for other in ("--device-bandwidth", "--copy-bandwidth"):
        assert (other in line) == (other != option)
    assert "at the peak" in text and "fits: as it is, --dense-layers 2" in text
    assert "full cache on the device fits: --dense-layers 32" in text
    record = json.loads(out.read_text())
    asked = record["asked"]
    assert asked["fits"] and asked["device"] > 0 and record["recommended"] == asked
    assert all(record[name]["seconds"] is None for name in ("asked", "full_on_device"))
    rates: dict[str, float | None] = {"memory_bandwidth": 1e11, "copy_bandwidth": 1e11}
    missing = {"--device-bandwidth": "copy_bandwidth", "--copy-bandwidth": "memory_bandwidth"}
    for name in rates if option is None else [missing[option]]:
        rates[name] = None
    assert rates.items() <= asked["machine"].items()


def test_the_xla_transfer_has_no_hot_set(folder):
    sizes = [planner(folder, SMALL_GPU, *given).asked.hot_set for given in ([], ["--transfer=xla"])]
    assert sizes == [2.0, 0.0]


def test_nothing_fits_a_pool_of_a_share(command):
    """The search for what would fit also tries contexts that are too short for the pool."""
    options = ("--context", "1024", "--pool-tokens", "10%", *GPU, "--device-memory", "0.01")
    status, text, _ = command(plan.main, *options)
    assert status == 0 and "nothing fits: at most 0 tokens" in text


def test_options_without_effect_are_named(folder, command):
    options = ("--model", folder, "--context", "1024", "--policy", "full", "--budget", "0.3", *GPU)
    status, _, errors = command(plan.main, *options)
    assert (status, errors) == (0, "--budget: no effect with --policy full\n")


def test_what_fits_without_bandwidths(folder, command):
    """The nearest settings that fit; else the largest batch and context that would."""
    options = ("--model", folder, "--context", "65536", "--host-memory", "256")
    status, text, _ = command(plan.main, *options, "--device-memory", "19.5")
    assert status == 0 and "too much" in text
    assert "would fit: --dense-layers 2 --hot-set 0 --rows auto: " in text
    status, text, _ = command(plan.main, *options, "--batch", "9", "--device-memory", "14")
    assert status == 0 and "nothing fits: at most " in text and " ms" not in text


def test_here_and_now(command, monkeypatch):
    """The embedded model on this machine, with its bandwidths measured."""
    from infinigen_jax.planner import bandwidths

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
