"""The generate command line: its output, its files, and how it ends."""

import importlib.metadata
import inspect
import io
import json
import os
import re
import signal
import sys
from typing import Any

import pytest
from tiny import only, python, started
from transformers import AutoTokenizer

import infinigen_jax as ig
from infinigen_jax import Engine, InputError, evaluate, generate, plan
from infinigen_jax.cli.options import DEFAULT_MODEL, load_engine, make_policy, make_pool
from infinigen_jax.convert.__main__ import main as convert_main
from infinigen_jax.engine import memory_plan as planning
from infinigen_jax.generate import DEFAULT_PROMPT
from infinigen_jax.loading.load import EMBEDDED, embedded
from infinigen_jax.messages import Messages
from infinigen_jax.policies import ENTRY_POINTS, find_policy

pytestmark = pytest.mark.usefixtures("shallow")

KINDS: dict[type, str] = {
    list: "tokens texts",
    int: "prompt_tokens new_tokens host_cache_bytes device_index_bytes hot_set_bytes "
    "compilations_after_warmup",
    float: "prefill_seconds decode_seconds decode_tokens_per_second selected_fraction "
    "fetched_fraction hot_set_hit_rate host_to_device_bytes_per_token",
    str: "policy schedule transfer rows",
}
ELSEWHERE = """
import dataclasses
from typing import Annotated
from infinigen_jax.policies import Window
from infinigen_jax.policies.base import Budgeted

@dataclasses.dataclass(frozen=True, kw_only=True)
class Needs(Window):
    stride: int
    name = "needs"

@dataclasses.dataclass(frozen=True, kw_only=True)
class Odd(Window):
    odd: tuple[int, ...] = ()

@dataclasses.dataclass(frozen=True, kw_only=True)
class Noted(Window):
    page: Annotated[int, {"help": "a type without a hash"}] = 8

@dataclasses.dataclass(frozen=True, kw_only=True)
class Divides(Window):
    name = "divides"
    budget: float = 1.0
    def __post_init__(self): 1 / (self.budget - 0.5)

class Recent(Window): name = "recent"
class Refuses(Window):
    name = "refuses"
    def __post_init__(self): raise ValueError("3 is odd")
class Plain: ...
class Selectless(Budgeted): name = "selectless"
class Narrow(Window):
    def append(self, weights, state, keys): return state
class Early(Window): lead = 2
class Blind(Window): lead, observes = 0, True
class Blocks(Window): observes, tail_block = True, 16
class Raising(Window):
    def select(self, lookup): raise RuntimeError("not today")
class Nothing(Window):
    def select(self, lookup): return None
"""
GENERATE = ("-m", "infinigen_jax.generate")
SHORT = ("--prompt", "The king said", "--max-new-tokens", "4")


@pytest.fixture
def run(command):
    """Return `run(*arguments)`, which runs this file's command; `main` may be another one's."""
    return lambda *arguments, main=generate.main: command(main, *arguments)


def test_text_on_stdout_and_stats_in_a_file(run, tmp_path):
    stats = tmp_path / "stats.json"
    status, out, err = run(*SHORT, "--stats-json", stats)
    record = json.loads(stats.read_text())
    assert status == 0 and out == record["texts"][0] + "\n" and "tokens/s" in err
    for kind, names in KINDS.items():
        assert {type(record[name]) for name in names.split()} == {kind}, names
    assert [len(tokens) for tokens in record["tokens"]] == [4] and record["new_tokens"] == 4
    tokenizer = AutoTokenizer.from_pretrained(str(embedded()))
    assert record["texts"] == [tokenizer.decode(record["tokens"][0], skip_special_tokens=True)]
    assert record["prompt_tokens"] == len(tokenizer.encode("The king said"))
    assert record["policy"] == "infinigen" and record["schedule"] == "fused"
    assert record["transfer"] in ("xla", "cuda") and record["compilations_after_warmup"] == 0
    assert 0 <= record["fetched_fraction"] <= 0.1 and record["host_cache_bytes"] > 0
    assert min(record["prefill_seconds"], record["decode_seconds"]) > 0
    assert only(tmp_path) == ["stats.json"]


def test_prompts_from_stdin(run, monkeypatch):
    """Without a byte order mark and the last line break; the default prompt if there is nothing."""
    lines: dict[str, str] = {}
    for text in ("\ufeffThe king said\n", "", "\n"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        status, lines[text], _ = run(*SHORT[2:], "--quiet")
        assert status == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert f"no prompt was given; this one is used: {DEFAULT_PROMPT}" in run(*SHORT[2:])[2]
    assert run(*SHORT, "--quiet")[1] == lines["\ufeffThe king said\n"] != lines[""] == lines["\n"]
    # In the C locale, bytes that are not UTF-8 become lone surrogates.
    for wrong in (io.TextIOWrapper(io.BytesIO(b"\x80"), "utf-8"), io.StringIO("said \udcff")):
        monkeypatch.setattr(sys, "stdin", wrong)
        assert "error: stdin: not UTF-8" in run(*SHORT[2:])[2]


def test_a_policy_of_another_package(run, refused, tmp_path, monkeypatch):
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    (tmp_path / "unreadable.py").write_text("x = (")
    monkeypatch.syspath_prepend(tmp_path)
    asked = ["--policy", "elsewhere:Recent:window=8", "--budget", "0.5"]
    policy: Any = make_policy(generate.build_parser().parse_args(asked))
    assert (policy.name, policy.window, policy.budget) == ("recent", 8, 0.5)
    asked = ["--policy", "elsewhere:Noted:window=9"]
    policy = make_policy(generate.build_parser().parse_args(asked))
    assert (policy.window, policy.page) == (9, 8)
    for name, message in {
        "elsewhere:Recent:page=8": "'page' is no setting; use sinks, window, budget",
        "elsewhere:Odd:odd=3": "'odd' is a setting for Python alone; use sinks, window, budget",
        "elsewhere:Missing": "no attribute 'Missing'",
        "elsewhere:dataclasses": "not a policy",
        "elsewhere:Plain": "not a policy",
        "elsewhere:Selectless": "a policy needs the method `select`",
        "elsewhere:Narrow": "`append`: too many positional arguments",
        "elsewhere:Early": "its `lead` is 2; use 0 or 1",
        "elsewhere:Blind": "one that `observes` needs a `lead` of 1",
        "elsewhere:Blocks": "one that `observes` has no `tail_block`",
        "quest:page=7": "page 7: use 1, 2, 4, 8, 16, 32, 64 or 128",
        "elsewhere:Needs": "--policy elsewhere:Needs: .*stride",
        "elsewhere:Refuses": "--policy elsewhere:Refuses: 3 is odd",
        "unreadable:P": "--policy unreadable:P: SyntaxError",
        "missing:Recent": "No module named 'missing'",
        "elsewhere.Recent": "a class such as package.module:MyPolicy",
        ":": "--policy : use ",
    }.items():
        assert re.search(message, refused(generate.main, *SHORT, "--policy", name))
    given = (*SHORT, "--policy", "elsewhere:Divides", "--budget", "0.5")
    assert "--policy elsewhere:Divides: float division" in refused(generate.main, *given)
    for name, message in {  # found in the first step, after the first token
        "Raising": "elsewhere.py:[0-9]+, in select: RuntimeError: not today",
        "Nothing": "--policy window: `select` returned NoneType, not a Request",
    }.items():
        status, _, err = run(*SHORT, "--quiet", "--policy", f"elsewhere:{name}")
        assert status == 2 and re.fullmatch(f"error: .*{message}.*\n", err), err
    entry = importlib.metadata.EntryPoint("mine", "elsewhere:Recent", ENTRY_POINTS)
    found = importlib.metadata.EntryPoints([entry])
    monkeypatch.setattr(importlib.metadata, "entry_points", found.select)
    assert find_policy("mine").name == "recent"


def test_several_prompts_come_in_order(run, tmp_path):
    stats, first, second = (tmp_path / name for name in ("stats.json", "first", "second"))
    first.write_text("It was a")
    second.write_text("A third\nprompt, of two lines.\n")
    arguments = ("--prompt", "One", "--prompt-file", first, "--prompt-file", second)
    arguments = (*arguments, "--max-new-tokens", "6", "--policy", "full")
    status, out, err = run(*arguments, "--stats-json", stats)
    record = json.loads(stats.read_text())
    assert status == 0 and len(record["texts"]) == 3
    assert out == "".join(text + "\n" for text in record["texts"])
    # Labels are messages: stdout has the texts alone.
    labels = ["[1] One", "[2] It was a", "[3] A third prompt, of two lines."]
    assert err.splitlines()[:3] == labels and "tokens/s" in err
    assert record["fetched_fraction"] == 1.0 and record["policy"] == "full"
    # The end of each text is held back, as it may be the beginning of this one.
    ends = [value for text in record["texts"] for value in ("--stop", f"{text[-1]}~~~")]
    assert run(*arguments, *ends)[1] == out


def test_a_stop_string_in_the_first_token_at_a_terminal(run, tmp_path, monkeypatch):
    """There, the text of the first step is printed after the second step."""
    stats = tmp_path / "stats.json"
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    text = run(*SHORT, "--quiet")[1]
    status, out, _ = run(*SHORT, "--stop", text.strip()[0], "--stats-json", stats)
    record = json.loads(stats.read_text())
    assert status == 0 and out == record["texts"][0] + "\n"
    assert record["new_tokens"] == len(record["tokens"][0]) == 1


def test_help(run):
    """Expert options are shown only on request, but always accepted."""
    status, out, err = run("--help")
    shown = re.findall(r"^  (--[a-z-]+)", out, re.MULTILINE)
    assert status == 0 and err == "" and "conversation:" in out and 25 <= len(shown) <= 32
    assert "--stats-json" in shown and "--transfer" not in out and "--count" not in out
    status, out, err = run("--help-all")
    assert status == 0 and err == "" and "--transfer" in out and "--stats-json" in out


KEPT = [(False, "full", "folder"), (True, "full", "folder")]  # by JAX, by the package
NOT_KEPT = [(True, "elsewhere:Recent", "folder"), (True, "full", "elsewhere.py")]


@pytest.mark.parametrize("stores, policy, cache", KEPT + NOT_KEPT)
def test_programs_are_said_to_be_kept_where_they_are(stores, policy, cache, tmp_path, monkeypatch):
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / cache))
    monkeypatch.setattr("infinigen_jax.programs.program.stores_programs", lambda: stores)
    by_jax: list[bool] = []
    monkeypatch.setattr("infinigen_jax.files.user_cache.keep_programs", lambda: by_jax.append(True))
    given = ["--model", "tiny-llama", "--policy", policy]
    load_engine(generate.build_parser().parse_args(given), say := Messages(True))
    assert say.kept == ((stores, policy, cache) in KEPT) and bool(by_jax) is not stores


@pytest.mark.parametrize("main", [generate.main, convert_main, evaluate.main, plan.main])
def test_version(main, run):
    assert run("--version", main=main) == (0, f"infinigen_jax {ig.__version__}\n", "")


def test_numbers_of_tokens_with_a_suffix():
    parse = generate.build_parser().parse_args
    assert parse(["--context", "128k"]).context == 128 * 1024
    assert parse(["--max-new-tokens", "1K", "--batch", "1m"]).batch == 1 << 20
    arguments = parse(["--pool-tokens", "2k", "--prefill-chunk", "1k"])
    assert make_pool(arguments) == ig.Pool(tokens=2048)
    assert arguments.prefill_chunk == 1024


def test_shares_as_percentages():
    parse = generate.build_parser().parse_args
    assert parse(["--budget", "5%"]).budget == 0.05
    with pytest.raises(SystemExit):
        parse(["--temperature", "5%"])


def test_names_of_the_package():
    assert DEFAULT_MODEL == EMBEDDED[0]
    names = {name for names in ig._HOMES.values() for name in names}
    assert names <= set(dir(ig)) == set(ig.__all__) and all(getattr(ig, name) for name in dir(ig))
    shown = repr(ig.load("tiny-opt", "float32"))
    assert shown.startswith("Model(opt, 3 layers, ") and shown.endswith("tiny-opt)")
    assert "float32" in shown and "skew" in shown and len(shown) < 120


def test_stats_to_what_is_not_a_file(run, tmp_path):
    """A device or a pipe is written to; replacing it by a file would destroy it."""
    pipe, full = tmp_path / "pipe", tmp_path / "full"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert run(*SHORT, "--quiet", "--stats-json", pipe)[0] == 0
    assert json.loads(os.read(reader, 1 << 20))["new_tokens"] == 4
    os.close(reader)
    full.symlink_to("/dev/full")
    status, _, err = run(*SHORT, "--quiet", "--stats-json", full)
    assert status == 2 and "No space left" in err and err.count("\n") == 1
    assert pipe.is_fifo() and full.is_symlink() and only(tmp_path) == ["full", "pipe"]


def test_more_memory_than_there_is(refused, monkeypatch):
    monkeypatch.setattr(planning, "available_host_bytes", lambda: 3 << 10)
    message = refused(generate.main, *SHORT)
    assert "3.0 KiB" in message and "--max-new-tokens" in message


def test_the_command_alone(shallow_folder):
    model = shallow_folder / "tiny-opt"
    done = python(*GENERATE, "--model", model, *SHORT[:2], "--max-new-tokens", "1", "--quiet")
    assert done.returncode == 0 and done.stderr == "" and len(done.stdout) > 1


@pytest.mark.slow
def test_interrupted_in_the_middle(tmp_path):
    stats = tmp_path / "stats.json"
    options = "--prompt The --ignore-eos --max-new-tokens 1000 --schedule layerwise".split()
    arguments = (*GENERATE, "--model", embedded(), *options, "--stats-json", stats)
    with started(*arguments) as process:
        assert process.stdout is not None and process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=100)
    assert process.returncode == 130 and b"Traceback" not in err
    assert only(tmp_path) == []


STARTED = "a stub that begins nothing"
OPTIONS: dict[str, dict[str, Any]] = {
    "--pool-tokens 40 --pool-eviction lru --pool-sinks 2": {
        "pool": ig.Pool(tokens=40, eviction="lru", sinks=2)
    },
    "--temperature 0.5 --top-k 9 --seed 3": {
        "sampling": ig.Sampling(temperature=0.5, top_k=9, seed=3)
    },
    "--weights host --rows int8 --hot-set 2 --dense-layers 1": dict(
        weights="host", rows="int8", hot_set=2.0, dense_layers=1
    ),
    "--schedule layerwise --check --prefill-chunk 64 --batch 1 --max-new-tokens 3": dict(
        schedule="layerwise", check=True, prefill_chunk=64, batch=1, max_new_tokens=3
    ),
    "--lossless --draft-tokens 3 --draft-weights int4": dict(
        lossless=True, draft_tokens=3, draft_weights="int4"
    ),
}


@pytest.fixture
def given(monkeypatch) -> dict[str, Any]:
    """Return the arguments, by name, of the engines that are made and of their first start."""
    found: dict[str, Any] = {}

    class Stub(Engine):
        def __init__(self, *arguments: Any, **settings: Any):
            found.update(settings)
            super().__init__(*arguments, **settings)

        def start(self, *arguments: Any, **settings: Any) -> Any:
            bound = inspect.signature(Engine.start).bind(self, *arguments, **settings)
            found.update(bound.arguments)
            raise InputError(STARTED)

    monkeypatch.setattr("infinigen_jax.engine.engine.Engine", Stub)
    return found


@pytest.mark.parametrize("options", OPTIONS)
def test_options_reach_the_engine(options, given, refused):
    expected = OPTIONS[options]
    line = refused(generate.main, "--prompt", "The king", "--quiet", *options.split())
    assert STARTED in line and {key: given[key] for key in expected} == expected


def test_auto_leaves_settings_to_the_engine(given, refused):
    names = "dense_layers", "hot_set", "draft_tokens", "draft_weights", "prefill_chunk"
    options = (part for name in names for part in (f"--{name.replace('_', '-')}", "auto"))
    assert STARTED in refused(generate.main, "--prompt", "The king", "--quiet", *options)
    assert not given.keys() & set(names)
    shown = re.findall(r"\(default\s+auto:", generate.build_parser().format_help())
    assert len(shown) == len(names)
    line = refused(generate.main, "--prompt", "The king", "--draft-tokens", "automatic")
    assert "--draft-tokens automatic: it must be a whole number" in line


def test_prompts_and_their_prefix_reach_the_engine(given, refused, tmp_path):
    file, text = tmp_path / "prompt", "Once upon a time there was an old king. "
    file.write_text("Then")
    prompts = "--prompt", "He said", "--prompt-file", file
    assert STARTED in refused(generate.main, "--prefix", text, *prompts, "--quiet")
    engine = given["self"]
    assert given["prompts"] == [engine.encode(text + end) for end in ("He said", "Then")]
    assert given["prefix"] == engine.prefix_tokens(text) > 0
