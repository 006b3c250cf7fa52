"""The benchmark of decoding at a toy size: its results and its parts."""

import collections
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from runtime import slow_except

from benchmarks import decode, machine, memory, shapes, trace
from benchmarks.measure import Bench, needs_of, traffic_of, turns, waves_of
from benchmarks.systems import LLAMA_CPP, MARGIN, Ours, is_ours, settings
from infinigen_jax.engine.engine import Engine
from infinigen_jax.models import blueprint
from infinigen_jax.policies import InfiniGen

CONTEXT = 288  # more than sinks and window
SYSTEMS = "infinigen full-device infinigen-paper transformers".split()
SYSTEMS += ["transformers-static", "transformers-offloaded"]
MEASURED = [name for name in SYSTEMS if name != "transformers-offloaded"]
OURS = [name for name in MEASURED if is_ours(name)]
TOKENS, ROUNDS, STEPS, TRACED = 3, 2, 257, 2  # 257 single steps: one of them flushes


@pytest.fixture(scope="module", autouse=True)
def bandwidth():
    """Fix the bandwidth instead of measuring it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "memory_read_bandwidth", lambda: 1e10)
        yield


@pytest.fixture(scope="module", autouse=True)
def programs_of_this_process():
    """Compile in this process: traces lack the parts of programs compiled by another one.

    The benchmark turns the cache off too, and leaves it off.
    """
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "toy.json"
    arguments = f"--preset smoke --contexts {CONTEXT} --steps {STEPS} --trace-steps {TRACED}"
    assert decode.main([*arguments.split(), "--systems", *SYSTEMS, "--json", str(path)]) == 0
    return json.loads(path.read_text())


@pytest.fixture
def systems(result):
    return result["contexts"][0]["systems"]


@pytest.mark.bench
def test_result_tells_machine_and_settings(result):
    described, (context,) = result["machine"], result["contexts"]
    assert described["cores"] > 0 and described["memory_bytes"] > 0 and described["cpu"]
    assert {"jax", "torch", "transformers"} <= described["versions"].keys()
    assert {"date", "commit"} <= described.keys()
    assert result["settings"]["preset"] == "smoke" and result["settings"]["rounds"] == ROUNDS
    assert result["logits_relative_difference"] < 1e-3
    assert (context["context"], list(context["systems"])) == (CONTEXT, SYSTEMS)
    assert context["waves"] == [MEASURED]  # all of them took turns


@pytest.mark.bench
@pytest.mark.parametrize("name", MEASURED)
def test_every_system_is_timed_and_compared_with_its_floor(systems, name):
    entry = systems[name]
    assert len(entry["round_seconds"]) == ROUNDS and min(entry["round_seconds"]) > 0
    median = np.median(entry["round_seconds"])
    assert entry["tokens_per_second"] == pytest.approx(TOKENS / median)
    assert entry["compilations_after_warmup"] == 0
    singles = entry["single_steps"]
    assert singles["count"] == len(singles["milliseconds"]) == STEPS
    assert 0 < singles["p50_ms"] <= singles["p99_ms"] <= singles["max_ms"]
    needed = entry["bytes_per_step"]
    read = sum(needed[kind] for kind in ("weights", "device_cache", "index", "attended"))
    assert entry["floor_milliseconds"] == pytest.approx(read / 1e10 * 1e3)
    ratio = 1e3 * median / TOKENS / entry["floor_milliseconds"]
    assert entry["time_over_floor"] == pytest.approx(ratio)
    assert entry["link_share"] is None  # a CPU has no such bus


@pytest.mark.bench
@pytest.mark.parametrize("name", OURS)
def test_shares_of_a_traced_step_add_up(result, systems, name):
    traced = systems[name]["breakdown"]
    parts = traced["parts_ms"]
    assert traced["steps"] == TRACED and 0 < traced["step_ms"] < 1e3
    assert sum(parts.values()) == pytest.approx(traced["step_ms"])
    assert min(parts["attention"], parts["mlp"], parts["sampling"]) > 0
    selects = name != "full-device"
    assert (parts["speculation"] > 0, parts["selection"] > 0) == (selects, selects)
    # The CPU reads rows where they are, in its attention.
    assert traced["transfer_ms"] == parts["transfer"] == 0
    assert traced["guessed_share"] < 0.05
    lines = decode.table(result).splitlines()
    shown = next(line for line in lines[::-1] if line.startswith(f"| {name} |"))
    assert f"{parts['attention']:.2f} | {parts['mlp']:.2f}" in shown


@pytest.mark.bench
def test_what_systems_do(systems):
    plain, paper = systems["infinigen"], systems["infinigen-paper"]
    assert 0 < plain["fetched_fraction"] <= plain["selected_fraction"] <= 0.1
    assert systems["full-device"]["fetched_fraction"] is None
    # Two of three layers are streamed, and a fifth of the third one's rows is allowed.
    assert 2 / 3 < paper["fetched_fraction"] < 0.75
    assert plain["host_cache_bytes"] == paper["host_cache_bytes"] > 0  # no layer is dense
    # Flushes are distinguished from other steps; with the paper's window every step flushes.
    singles = plain["single_steps"]
    nearest = min(abs(one - singles["flush_ms"]) for one in singles["milliseconds"])
    assert nearest < 1e-3  # one of the steps, to the digits that are kept
    assert paper["single_steps"]["flush_ms"] is None
    for name in ("full-device", "transformers-static"):  # they attend to everything
        whole = (1 + ROUNDS) * (TOKENS + MARGIN) + STEPS
        assert systems[name]["first_tokens_equal_to_exact"] == whole
    absent = systems["transformers-offloaded"]
    assert absent["absent"] == "skipped" and "CUDA" in absent["reason"]


def test_memory_of_systems():
    options = decode.parse(["--preset", "smoke"])
    bench = Bench(options, model_of("toy"), None, (1e10, None), float("inf"))
    needs, absent = needs_of(bench, CONTEXT)
    assert absent.keys() == {"transformers-offloaded"}
    systems = decode.SYSTEMS.keys() - set(LLAMA_CPP)  # these need a file
    assert needs.keys() == systems - absent.keys()
    assert needs["full-streamed"].device < needs["infinigen"].device < needs["full-device"].device
    assert needs["full-device"].host_cache == 0
    assert 0 < needs["infinigen-int4"].host_cache < needs["infinigen"].host_cache


def test_every_system_follows_every_other_one_equally_often():
    for n in range(1, 8):
        names = list("abcdefg"[:n])
        rounds = [turns(names, number) for number in range(2 * n)]
        assert all(sorted(order) == names for order in rounds)
        pairs = [pair for order in rounds for pair in itertools.pairwise(order)]
        assert set(collections.Counter(pairs).values()) <= {2}
        assert len(set(pairs)) == n * (n - 1)


def test_waves_fill_the_room_in_order():
    needs = dict(zip("abcd", (4, 5, 3, 20), strict=True))
    assert waves_of(needs, lambda total: total <= 10) == [["a", "b"], ["c"], ["d"]]


def test_time_cap_leaves_a_result_that_says_so(tmp_path, monkeypatch):
    made = model_of("toy"), shapes.settings(shapes.SHAPES["toy"], 256)
    monkeypatch.setattr(shapes, "model_of", lambda *arguments: made)
    path = tmp_path / "late.json"
    arguments = f"--preset smoke --contexts 96 --cap-seconds 0 --systems infinigen --json {path}"
    assert decode.main(arguments.split()) == 0
    entry = json.loads(path.read_text())["contexts"][0]["systems"]["infinigen"]
    assert entry["absent"] == "skipped" and "time" in entry["reason"]


@pytest.mark.bench
def test_a_failure_keeps_what_was_measured_before(tmp_path, monkeypatch):
    """A trace without operations, and a system without memory in its second round."""

    def round_of(system: Ours, tokens: int) -> float:
        if system.run.decoder.host_layers and system.drawn:
            raise MemoryError("none left")
        return timed(system, tokens)

    timed = Ours.round
    monkeypatch.setattr(Ours, "round", round_of)
    monkeypatch.setattr(trace, "read", lambda folder: [])
    path = tmp_path / "failed.json"
    arguments = f"--preset smoke --contexts 96 --systems full-device infinigen --json {path}"
    assert decode.main([*arguments.split(), "--trace-steps", "2"]) == 0
    traced, failed = json.loads(path.read_text())["contexts"][0]["systems"].values()
    assert traced["tokens_per_second"] > 0 and "no operations" in traced["error"]
    assert failed == {"absent": "failed", "reason": "MemoryError: none left"}


@pytest.mark.bench
def test_small_weights_of_this_package(tmp_path):
    path = tmp_path / "small.json"
    text = tmp_path / "text.txt"
    text.write_text("It was a bright cold day in April. " * 20)
    arguments = "--preset smoke --contexts 96 --steps 6 --trace-steps 0 --weight-dtype int8"
    arguments += f" --model books-llama --text {text}"
    arguments += f" --systems full-device transformers --json {path}"
    assert decode.main(arguments.split()) == 0
    result = json.loads(path.read_text())
    assert "weights int8" in decode.title(result) and result["logits_relative_difference"] < 1e-3
    ours, theirs = result["contexts"][0]["systems"].values()
    assert ours["bytes_per_step"]["weights"] == result["model"]["weight_bytes_per_step"]
    assert theirs["tokens_per_second"] > 0 and "bytes_per_step" not in theirs


@functools.cache
def toy_engine(given: tuple) -> Engine:
    return Engine(model_of("toy"), **dict(given))


@pytest.mark.parametrize("name", decode.PRESETS)
def test_presets_parse_and_give_engines_their_settings(name):
    options = decode.parse(["--preset", name])
    given = decode.parse(decode.PRESETS[name].split())
    assert vars(options) == vars(given) | {"preset": name}
    assert decode.parse(["--preset", name, "--batch", "3"]).batch == 3
    model = model_of("toy")
    for system in filter(is_ours, decode.SYSTEMS):
        engine = toy_engine(tuple(settings(system, options, model, 1000).items()))
        assert engine.decoder.host_layers == {"full-device": 0, "infinigen-paper": 3}.get(system, 1)
        assert engine.runtime.settings.schedule == (
            "layerwise" if "layerwise" in system else "fused"
        )
        assert engine.decoder.rows == next((r for r in ("int8", "int4") if r in system), "auto")
        if system == "infinigen-fixed":
            fixed = engine.decoder.policy
            assert isinstance(fixed, InfiniGen)
            assert fixed.request_size(1000) == pytest.approx(options.budget_rows, abs=1)


def test_infinigen_with_other_settings_is_a_system_of_its_own(capsys):
    name = "infinigen:tail_columns=0,alpha=3"
    options = decode.parse(["--preset", "smoke", "--systems", name])
    assert options.systems == [name] and is_ours(name)
    policy = settings(name, options, model_of("toy"), 1000)["policy"]
    assert (policy.tail_columns, policy.alpha) == (0, 3)
    for wrong in ("quest", "infinigen:page=8", "infinigen:alpha=-1", "infinigen:"):
        with pytest.raises(SystemExit, match="2"):
            decode.parse(["--systems", wrong])
        assert "error: argument --systems" in capsys.readouterr().err


def test_llama_cpp_needs_a_file(capsys):
    with pytest.raises(SystemExit, match="2"):
        decode.parse(["--systems", "llama.cpp"])
    assert "llama.cpp needs --gguf" in capsys.readouterr().err


@functools.cache
def model_of(name):
    return shapes.peaked_model(shapes.SHAPES[name], 256, "float32")


@pytest.mark.parametrize("name", slow_except(["toy", "toy-opt"], "toy"))
def test_traffic_counts_weights_and_cache(name):
    model = model_of(name)
    config = model.config
    traffic = traffic_of("transformers", model, batch=2, context=100)
    assert traffic.device_cache == (
        2 * 100 * config.num_layers * config.num_kv_heads * config.head_dim * 2 * 4
    )
    assert 0 < traffic.weights < 4 * sum(x.size for x in jax.tree.leaves(model.params))
    total = traffic.weights + traffic.device_cache
    assert traffic.floor_ms(1e9, None) == pytest.approx(total / 1e6)


@pytest.mark.parametrize("name", slow_except(["toy", "toy-opt"], "toy"))
def test_attention_is_peaked_and_mostly_common_to_all_queries(name):
    """Logits of the first layer have the requested spread, and few columns hold them."""
    model = model_of(name)
    architecture = blueprint(model.config, jnp.float32)
    tokens = jnp.asarray(shapes.prompt(model.config, 256))
    positions = jnp.arange(256, dtype=jnp.int32)
    x = architecture.embedding(model.params["embedding"]).embed(tokens, positions)
    layer = architecture.layer(model.params["layers"][0])
    a = layer.attention_input(x)
    q, (k, _) = layer.query(a, positions), layer.key_value(a, positions)
    k = jnp.repeat(k, model.config.group_size, axis=1)
    scores = jnp.einsum("shd,thd->hst", q, k)
    assert 0.5 < float(scores.std()) / shapes.SCORE_DEVIATION < 1.5
    # Queries mostly agree on which keys they like, near or far from each other.
    pairs = np.stack([np.corrcoef(head[::16]) for head in np.asarray(scores)])
    assert 0.5 < np.median(pairs) < 0.95  # COMMON, except that a toy has few channels
    basis = model.bases[0]
    assert basis is not None
    quarter = model.config.head_dim // 4
    partial = jnp.einsum("shd,hdr->shr", q, jnp.repeat(basis.query, model.config.group_size, 0))
    energy = jnp.sum(partial**2, axis=(0, 1))
    assert float(energy[:quarter].sum() / energy.sum()) > 0.5


@pytest.mark.bench
def test_memory_against_its_plan():
    """In this process, the memory of a toy model is too small to measure."""
    options = ("--policy=infinigen:window=32",)
    case = memory.Case("toy", "toy", 120, batch=2, new_tokens=8, options=options)
    record = memory.measure(case)
    assert record["planned"]["host_cache"] == 2 * 128 * 1 * 2 * 2 * 16 * 4
    assert record["measured"]["total"] > record["measured"]["weights"] > 0
    assert record["ratio"] == record["planned"]["total"] / record["measured"]["total"]
    assert "planned/measured" in memory.line(record)
