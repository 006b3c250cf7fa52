"""Faults outside of the program end with one line that names the remedy, and status 2."""

import argparse
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny import interruptible, only, python

from infinigen_jax import embedded, evaluate, generate, plan
from infinigen_jax.convert import __main__ as convert
from infinigen_jax.errors import OUT_OF_MEMORY, InputError, Parser, run_command, with_options
from infinigen_jax.files.atomic import on_termination
from infinigen_jax.messages import Messages


def error_lines(done: subprocess.CompletedProcess[str], number: int = 1) -> list[str]:
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == number and "Traceback" not in done.stderr and done.stdout == ""
    return errors


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="there is a GPU")
def test_a_platform_that_is_absent(tmp_path):
    given = ("infinigen_jax.convert", embedded(), tmp_path / "out")
    done = python("-m", *given, JAX_PLATFORMS="cuda")
    assert "JAX_PLATFORMS=cuda" in error_lines(done)[0] and "JAX_PLATFORMS=cpu" in done.stderr
    assert only(tmp_path) == []


LIMITED = """
import resource, sys
from pathlib import Path
import infinigen_jax as ig
from infinigen_jax import generate
from infinigen_jax.engine import generation as run
from infinigen_jax.errors import run_command
from infinigen_jax.machine.memory_limits import available_host_bytes

engine = ig.Engine(ig.load(sys.argv[1]))
engine.generate([[3] * 20], max_new_tokens=3)  # its threads and libraries are there
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + (100 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
assert available_host_bytes() <= 100 << 20
too_much = lambda: engine.generate([[3] * 200] * 256, max_new_tokens=300, batch=256)
parser = generate.build_parser()
assert run_command(too_much, parser) == 2
run.check_memory = lambda *arguments: None  # not foreseen
sys.exit(run_command(too_much, parser))
"""


@pytest.mark.slow
def test_a_limit_of_memory(shallow_folder):
    """256 sequences of 500 tokens in 100 MiB: refused beforehand, and when allocation fails."""
    foreseen, unforeseen = error_lines(python("-c", LIMITED, shallow_folder / "books-llama"), 2)
    options = generate.build_parser().options
    message = with_options(OUT_OF_MEMORY, options)
    assert "are available" in foreseen and message not in foreseen
    assert "are available" not in unforeseen and message in unforeseen
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
    assert run_command(lambda: (_ for _ in ()).throw(RuntimeError("can't start new thread"))) == 2
    assert "(ulimit -u)" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="a bug"):
        run_command(lambda: (_ for _ in ()).throw(RuntimeError("a bug")))


def test_streams_that_the_caller_closed(monkeypatch):
    """Input is empty, output is lost, and the exit status stays correct."""
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


@pytest.mark.parametrize(
    ("number", "status", "busy"),
    [(signal.SIGINT, 130, False), (signal.SIGINT, 130, True), (signal.SIGTERM, 143, False)],
)
def test_signals_in_a_callback_that_loses_exceptions(number, status, busy, monkeypatch):
    """JAX's callback of the garbage collector is another one; other processes may take the time."""
    if busy:
        start = threading.Thread.start

        def late(thread: threading.Thread) -> None:
            start(thread)
            time.sleep(0.1)

        monkeypatch.setattr(threading.Thread, "start", late)

    class Losing:
        def __del__(self) -> None:
            signal.raise_signal(number)

    def command() -> None:
        with on_termination():
            Losing()
            time.sleep(20)

    with interruptible():
        assert run_command(command) == status


@pytest.mark.parametrize("program", [False, True])
def test_an_interrupted_program_ends_without_the_interpreter(program):
    """Which would crash while a thread of XLA compiles."""
    code = f"""
import atexit
from infinigen_jax.errors import run_command
atexit.register(print, "the interpreter ends")
def command():
    print("text")
    raise KeyboardInterrupt
raise SystemExit(run_command(command, program={program}))
"""
    done = python("-c", code)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
    assert done.stdout == ("text\n" if program else "text\nthe interpreter ends\n")


def test_a_variable_that_jax_refuses():
    command = ("-m", "infinigen_jax.generate", "--prompt", "The")
    (line,) = error_lines(python(*command, JAX_ENABLE_X64="maybe"))
    assert "'maybe'" in line and "'JAX_ENABLE_X64'; correct it" in line


def test_messages_that_cannot_be_written_end_no_command(monkeypatch):
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    Messages()("a message")


def broken_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("main", [generate.main, convert.main, evaluate.main, plan.main])
def test_output_that_cannot_be_written(main, buffered, monkeypatch, capsys):
    """A full disk is reported, and a reader that went away ends the command quietly."""

    def status(place: str | int) -> int:
        binary = open(place, "wb", buffering=-1 if buffered else 0)
        with io.TextIOWrapper(binary, write_through=not buffered) as output:
            monkeypatch.setattr(sys, "stdout", output)
            return main(["--help"])  # closing fails if something is left

    assert status(broken_pipe()) == 141
    assert capsys.readouterr().err == ""
    assert status("/dev/full") == 2
    err = capsys.readouterr().err
    assert err.startswith("error: standard output: No space left") and err.count("\n") == 1


def numeric_options(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from numeric_options(inner)
        elif isinstance(action.default, int | float) or action.type is not None:
            if not isinstance(action.default, bool):
                yield action


@pytest.mark.parametrize("module", [generate, evaluate, plan])
def test_numbers_beyond_sizes(module):
    """Every numeric option of a command has a range that its arithmetic can hold."""
    actions = list(numeric_options(module.build_parser()))
    assert actions
    for action in actions:
        assert action.type not in (int, float), action.option_strings
        assert callable(action.type)
        for text in ("nan", "-1e308", "1e308", "-1", "9" * 23, "9" * 5000, "", "x"):
            unlimited = action.dest == "alpha" and text[:1] in ("1", "9")
            if unlimited:
                assert float(str(action.type(text))) > 1e20
                continue
            if text == "-1" and action.dest in ("presence_penalty", "frequency_penalty"):
                continue  # from -2 to 2, as in OpenAI's interface
            with pytest.raises(argparse.ArgumentTypeError) as caught:
                action.type(text)
            assert len(str(caught.value)) < 200


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
