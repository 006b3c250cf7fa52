"""What goes wrong outside of the program ends with one line that says what to do, and status 2."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import ROOT, only

from infinigen_jax.checkpoint import embedded
from infinigen_jax.errors import OUT_OF_MEMORY, InputError, Parser, run_command
from infinigen_jax.evaluation.lost_in_the_middle import read_lines


def python(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, *(str(argument) for argument in arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def error_lines(done: subprocess.CompletedProcess[str], number: int = 1) -> list[str]:
    """The error messages of a command that failed as it should."""
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == number and "Traceback" not in done.stderr and done.stdout == ""
    return errors


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="there is a GPU")
@pytest.mark.parametrize("command", ["generate", "convert"])
def test_a_platform_that_is_not_here(command, tmp_path):
    given = {
        "generate": ("--max-new-tokens", "2"),
        "convert": (embedded(), tmp_path / "out"),
    }[command]
    done = python("-m", f"infinigen_jax.{command}", *given, JAX_PLATFORMS="cuda")
    assert "JAX_PLATFORMS=cuda" in error_lines(done)[0] and "JAX_PLATFORMS=cpu" in done.stderr
    assert only(tmp_path) == []


LIMITED = """
import resource, sys
from pathlib import Path
import infinigen_jax as ig
from infinigen_jax import run
from infinigen_jax.errors import run_command
from infinigen_jax.memory_limits import available_host_bytes

engine = ig.Engine(ig.load(sys.argv[1]))
engine.generate([[3] * 20], max_new_tokens=3)  # its threads and libraries are there
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + (100 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
assert available_host_bytes() <= 100 << 20
too_much = lambda: engine.generate([[3] * 200] * 256, max_new_tokens=300, batch=256)
assert run_command(too_much) == 2
run.check_memory = lambda *arguments: None  # not foreseen
sys.exit(run_command(too_much))
"""


def test_a_limit_of_memory(shallow_folder):
    """256 sequences of 500 tokens in 100 MiB: refused beforehand, and when allocation fails."""
    foreseen, unforeseen = error_lines(python("-c", LIMITED, shallow_folder / "books-llama"), 2)
    assert "are available" in foreseen and OUT_OF_MEMORY not in foreseen
    assert "are available" not in unforeseen and OUT_OF_MEMORY in unforeseen
    assert all("--max-new-tokens, --batch" in message for message in (foreseen, unforeseen))


@pytest.mark.parametrize(
    "error",
    [MemoryError(), OSError(12, "Cannot allocate memory"), RuntimeError("RESOURCE_EXHAUSTED: x")],
)
def test_every_kind_of_out_of_memory(error, capsys):
    def fail() -> None:
        raise error

    assert run_command(fail) == 2
    assert OUT_OF_MEMORY in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="a bug"):
        run_command(lambda: (_ for _ in ()).throw(RuntimeError("a bug")))


def test_streams_that_the_caller_closed(monkeypatch):
    """Nothing is read there, what is printed is lost, and the exit status is what it is."""
    names = ("stdin", "stdout", "stderr")
    for name in names:
        monkeypatch.setattr(sys, name, None)

    def command() -> None:
        assert sys.stdin.readline() == ""
        print("lost")
        raise InputError("lost, too")

    assert run_command(command) == 2
    for name in names:
        getattr(sys, name).close()


def test_messages_repeat_no_more_than_a_terminal_should_show(capsys):
    """Values of files and options may be long, of several lines, or control the terminal."""

    def fail() -> None:
        raise InputError(f"config.json: name is {value}; get the file again")

    value = "a\nb\x1b[2J\udcff" + "c" * 100_000
    assert run_command(fail) == 2
    with pytest.raises(SystemExit):
        Parser(prog="p").parse_args([f"--{value}"])
    for line in capsys.readouterr().err.splitlines():
        assert line.startswith("error: ") and len(line) < 1200 and line.isprintable()
        assert "a b\\x1b[2J\\udcff" in line and line.endswith(("get the file again", "see --help"))


def test_texts_in_files_are_utf8_even_where_json_escapes_it(tmp_path):
    (tmp_path / "items.jsonl").write_text(
        '{"query": "a \\ud800", "choices": ["b", "c"], "gold": 0}'
    )
    with pytest.raises(InputError, match=r"--data .*items.jsonl: not jsonl .*surrogates"):
        read_lines("--data", str(tmp_path / "items.jsonl"))
