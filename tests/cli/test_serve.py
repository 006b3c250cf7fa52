"""The command line of the server: what it refuses before it listens."""

import contextlib
import socket

import pytest

from infinigen_jax import serve
from infinigen_jax.server.scheduler import Scheduler

pytestmark = pytest.mark.usefixtures("shallow")


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--context", "1"], "--context"),
        (["--context", "4096"], "--context 4096"),
        (["--port", "99999"], "--port"),
        (["--host", "203.0.113.1"], "--host 203.0.113.1"),
        (["--pool-tokens", "100"], "--pool-tokens"),
        (["--batch", "1000000", "--context", "1k"], "--batch"),
        (["--policy", "none"], "--policy"),
        (["--policy", "full", "--lossless"], "--lossless"),
        (["--api-key", ""], "--api-key"),
    ],
)
def test_bad_options(command, arguments, named):
    status, out, err = command(serve.main, "--port", "0", *arguments)
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (status, out, len(lines)) == (2, "", 1)
    assert named in lines[0] and "Traceback" not in err


def test_a_failure_ends_the_server(command, monkeypatch):
    def fail(scheduler: Scheduler) -> None:
        raise RuntimeError("no memory is left")

    monkeypatch.setattr(Scheduler, "_warm_up", fail)
    # Signals are the main thread's, which runs the tests.
    monkeypatch.setattr("uvicorn.Server.capture_signals", lambda self: contextlib.nullcontext())
    arguments = ("--port", "0", "--context", "64", "--batch", "1")
    status, _, err = command(serve.main, "--model", "tiny-llama", *arguments)
    assert status == 2 and err.splitlines()[-1] == "error: no memory is left"


def test_a_port_in_use(command):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, _, err = command(serve.main, "--port", taken.getsockname()[1])
    assert status == 2 and "--port" in err
