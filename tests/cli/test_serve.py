"""The command line of the server: how it ends where it cannot serve."""

import contextlib
import socket

import pytest

from infinigen_jax import serve
from infinigen_jax.server.scheduler import Scheduler

pytestmark = pytest.mark.usefixtures("shallow")


def test_a_failure_ends_the_server(command, monkeypatch):
    def fail(scheduler: Scheduler) -> None:
        raise RuntimeError("no memory is left")

    monkeypatch.setattr(Scheduler, "_warm_up", fail)
    # Signals are the main thread's, which runs the tests.
    monkeypatch.setattr("uvicorn.Server.capture_signals", lambda self: contextlib.nullcontext())
    arguments = ("--port", "0", "--context", "64", "--batch", "1")
    status, _, err = command(serve.main, "--model", "tiny-llama", *arguments)
    assert status == 2 and err.splitlines()[-1] == "error: no memory is left"


def test_a_port_in_use(refused):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "--port" in refused(serve.main, "--port", taken.getsockname()[1])
