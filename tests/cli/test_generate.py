"""The generate command line: what it prints and writes, and how it refuses bad input."""

import importlib.metadata
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny import ROOT, only, python
from transformers import AutoTokenizer

import infinigen_jax as ig
from infinigen_jax import evaluate, generate, plan
from infinigen_jax.cli.options import DEFAULT_MODEL, make_policy, make_pool
from infinigen_jax.convert.__main__ import main as convert_main
from infinigen_jax.engine import memory_plan as planning
from infinigen_jax.loading.load import EMBEDDED, embedded
from infinigen_jax.policies import ENTRY_POINTS, find_policy

pytestmark = pytest.mark.usefixtures("shallow")

KEYS = {
    "tokens": list,
    "texts": list,
    "prompt_tokens": int,
    "new_tokens": int,
    "prefill_seconds": float,
    "decode_seconds": float,
    "decode_tokens_per_second": float,
    "selected_fraction": float,
    "fetched_fraction": float,
    "hot_set_hit_rate": float,
    "host_to_device_bytes_per_token": float,
    "host_cache_bytes": int,
    "device_index_bytes": int,
    "hot_set_bytes": int,
    "compilations_after_warmup": int,
    "policy": str,
    "schedule": str,
    "transfer": str,
    "rows": str,
}
ELSEWHERE = """
import dataclasses
from typing import ClassVar
from infinigen_jax.policies import Window

@dataclasses.dataclass(frozen=True, kw_only=True)
class Recent(Window):
    name: ClassVar[str] = "recent"
"""
GENERATE = ("-m", "infinigen_jax.generate")
SHORT = ("--prompt", "The king said", "--max-new-tokens", "4")


@pytest.fixture(autouse=True)
def private_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def run(command):
    """`run(*arguments)` is the command of this file; `main` may be another one's."""
    return lambda *arguments, main=generate.main: command(main, *arguments)


@pytest.fixture
def refused(refused, tmp_path):
    """`refused(*arguments)` checks how this file's command fails, and returns its one line."""
    stats = tmp_path / "never.json"

    def call(*arguments: str | Path) -> str:
        if "--stats-json" not in arguments:
            arguments = (*arguments, "--stats-json", stats)
        line = refused(generate.main, *arguments)
        assert not stats.exists()
        assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
        return line

    return call


def copy_of_model(folder: Path, name: str = "tiny-llama") -> Path:
    return Path(shutil.copytree(embedded(name), folder))


def source_of_model(folder: Path) -> Path:
    """A model folder as from Hugging Face, never converted."""
    copy_of_model(folder)
    for name in ("infinigen.json", "infinigen.safetensors"):
        (folder / name).unlink()
    return folder


# What it prints and writes.


def test_text_on_stdout_and_stats_in_a_file(run, tmp_path):
    stats = tmp_path / "stats.json"
    status, out, err = run(*SHORT, "--stats-json", stats)
    record = json.loads(stats.read_text())
    assert status == 0 and out == record["texts"][0] + "\n" and "tokens/s" in err
    assert set(KEYS) <= set(record)
    for name, kind in KEYS.items():
        assert type(record[name]) is kind, name
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
    """Without their last line break; nothing on stdin, as of a service, is the default prompt."""
    lines: dict[str, str] = {}
    for text in ("The king said\n", "", "\n"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        status, lines[text], _ = run(*SHORT[2:], "--quiet")
        assert status == 0
    assert run(*SHORT, "--quiet")[1] == lines["The king said\n"] != lines[""] == lines["\n"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\x80"), "utf-8"))
    assert "error: stdin: not UTF-8" in run(*SHORT[2:])[2]


def test_a_policy_of_another_package(run, tmp_path, monkeypatch):
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    monkeypatch.syspath_prepend(tmp_path)
    asked = ["--policy", "elsewhere:Recent:window=8", "--budget", "0.5"]
    policy: Any = make_policy(generate.build_parser().parse_args(asked))
    assert (policy.name, policy.window, policy.budget) == ("recent", 8, 0.5)
    for name, message in {
        "elsewhere:Recent:page=8": "'page' is no setting; use sinks, window, budget",
        "elsewhere:Missing": "no attribute 'Missing'",
        "elsewhere:dataclasses": "not a policy",
        "missing:Recent": "No module named 'missing'",
        "elsewhere.Recent": "a class such as package.module:MyPolicy",
        ":": "--policy : use ",
    }.items():
        status, out, err = run(*SHORT, "--policy", name)
        assert status == 2 and out == "" and err.count("\n") == 1 and message in err
    entry = importlib.metadata.EntryPoint("mine", "elsewhere:Recent", ENTRY_POINTS)
    found = importlib.metadata.EntryPoints([entry])
    monkeypatch.setattr(importlib.metadata, "entry_points", found.select)
    assert find_policy("mine").name == "recent"


def test_several_prompts_come_in_order(run, tmp_path):
    stats, file = tmp_path / "stats.json", tmp_path / "prompt"
    file.write_text("A third\nprompt, of two lines.\n")
    arguments = ("--prompt", "One", "--prompt", "It was a", "--prompt-file", file)
    arguments = (*arguments, "--max-new-tokens", "6", "--policy", "full")
    status, out, err = run(*arguments, "--stats-json", stats)
    record = json.loads(stats.read_text())
    assert status == 0 and len(record["texts"]) == 3
    assert out == "".join(text + "\n" for text in record["texts"])
    # Labels are messages: stdout has the texts alone.
    labels = ["[1] One", "[2] It was a", "[3] A third prompt, of two lines."]
    assert err.splitlines()[:3] == labels and "tokens/s" in err
    assert record["fetched_fraction"] == 1.0 and record["policy"] == "full"


@pytest.mark.slow
def test_a_folder_that_was_never_converted(run, tmp_path):
    source = source_of_model(tmp_path / "source")
    before = only(source)
    status, out, err = run("--model", source, *SHORT)
    assert status == 0 and "not converted yet" in err and only(source) == before
    assert run("--model", source, *SHORT, "--quiet") == (0, out, "")


def test_help(run):
    """Expert options are shown only when all are asked for, and are options all the same."""
    status, out, err = run("--help")
    shown = re.findall(r"^  (--[a-z-]+)", out, re.MULTILINE)
    assert status == 0 and err == "" and "conversation:" in out and 25 <= len(shown) <= 32
    assert "--stats-json" in shown and "--transfer" not in out and "--count" not in out
    status, out, err = run("--help-all")
    assert status == 0 and err == "" and "--transfer" in out and "--stats-json" in out


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


def test_names_of_the_package():
    assert DEFAULT_MODEL == EMBEDDED[0]
    assert set(dir(ig)) == set(ig.__all__) and all(getattr(ig, name) for name in dir(ig))
    shown = repr(ig.load("tiny-opt", "float32"))
    assert shown.startswith("Model(opt, 3 layers, ") and shown.endswith("tiny-opt)")
    assert "float32" in shown and "skew" in shown and len(shown) < 120


def test_stats_to_what_is_not_a_file(run, tmp_path):
    """A device or a pipe is written to; replacing it by a file would destroy it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert run(*SHORT, "--quiet", "--stats-json", pipe)[0] == 0
    assert set(KEYS) <= set(json.loads(os.read(reader, 1 << 20)))
    os.close(reader)
    assert pipe.is_fifo() and only(tmp_path) == ["pipe"]


def test_a_full_disk(run, tmp_path):
    if not Path("/dev/full").is_char_device():
        pytest.skip("there is no /dev/full")
    link = tmp_path / "full"
    link.symlink_to("/dev/full")
    status, _, err = run(*SHORT, "--quiet", "--stats-json", link)
    assert status == 2 and "No space left" in err and err.count("\n") == 1
    assert link.is_symlink() and only(tmp_path) == ["full"]


# Processes.


def test_the_command_alone():
    done = python(*GENERATE, *SHORT[:2], "--max-new-tokens", "1", "--quiet")
    assert done.returncode == 0 and done.stderr == "" and len(done.stdout) > 1


def test_an_option_error_is_quick_and_one_line():
    done = python(*GENERATE, "--prompt-file", "/nonexistent/prompt")
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert "/nonexistent/prompt" in done.stderr


@pytest.mark.slow
def test_interrupted_in_the_middle(tmp_path):
    stats = tmp_path / "stats.json"
    arguments = ("--model", embedded(), "--prompt", "The", "--ignore-eos", "--max-new-tokens", 1000)
    arguments = (*GENERATE, *arguments, "--stats-json", stats, "--schedule", "layerwise")
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 130 and "Traceback" not in err
    assert only(tmp_path) == []


# What is refused.


def test_folders_that_are_no_models(refused, tmp_path):
    assert "no such folder" in refused("--model", tmp_path / "absent")
    file = tmp_path / "file"
    file.write_text("x")
    assert "is a file" in refused("--model", file)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "config.json" in refused("--model", empty)
    refused("--model", "")


def test_models_without_tokenizer(refused, tmp_path):
    model = copy_of_model(tmp_path / "model")
    manifest = json.loads((model / "infinigen.json").read_text())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
        manifest["files"].pop(name, None)
    (model / "infinigen.json").write_text(json.dumps(manifest))
    assert "has no tokenizer" in refused("--model", model)


def test_prompts(refused, tmp_path):
    assert "--prompt" in refused("--prompt", "")
    assert "/absent" in refused("--prompt-file", tmp_path / "absent")
    assert "--prompt-file" in refused("--prompt-file", tmp_path)
    assert "leaves room" in refused("--prompt", "and so on " * 500)  # and no other message
    binary = tmp_path / "binary"
    binary.write_bytes(b"\x80\xff\x00")
    assert "not UTF-8" in refused("--prompt-file", binary)
    binary.write_bytes(b"")
    refused("--prompt-file", binary)
    # What the shell passes when an argument is not UTF-8.
    refused("--prompt", os.fsdecode(b"caf\xe9"))
    assert "--prefix: not UTF-8" in refused("--prompt", "A", "--prefix", os.fsdecode(b"caf\xe9"))


def test_stats_files_that_cannot_be(refused, tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    for path in (tmp_path / "absent" / "stats.json", file / "stats.json", tmp_path, ""):
        assert "--stats-json" in refused("--stats-json", path)
    assert file.read_text() == "x"


def test_more_memory_than_there_is(refused, monkeypatch):
    monkeypatch.setattr(planning, "available_host_bytes", lambda: 3 << 10)
    message = refused(*SHORT)
    assert "3.0 KiB" in message and "--max-new-tokens" in message
