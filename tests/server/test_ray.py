"""Two replicas under Ray Serve, on this machine; left out where Ray is not installed."""

import concurrent.futures
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tiny import ROOT, environment, started

pytest.importorskip("ray.serve")
pytestmark = pytest.mark.slow
SIZES = "--context 1024 --batch 4 --replicas 2 --replica-cpus 0.5 --no-page".split()


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[tuple[Any, Path]]:
    """A client of two replicas, and their log."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    log = tmp_path / "log"
    command = ("-u", ROOT / "deploy/ray_serve.py", "--model", "tiny-llama", "--port", port, *SIZES)
    variables = environment(RAY_DEDUP_LOGS="0")  # every request has its line
    with open(log, "w") as file:
        process = started(
            *command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd=ROOT, env=variables
        )
        try:
            wait(lambda: f"http://127.0.0.1:{port}\n" in log.read_text(), process, 300)
            yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x"), log
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, log.read_text()
        finally:
            process.kill()
            process.wait()


def wait(condition: Any, process: subprocess.Popen, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.2)


def test_two_replicas(replicas):
    """Both answer, alike and in streams; a client that goes away frees its sequence."""
    client, log = replicas
    settings: Any = {"model": "tiny-llama", "prompt": "Once upon a time", "temperature": 0}

    def complete(_: int) -> str:
        return client.completions.create(**settings, max_tokens=60).choices[0].text

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        texts = set(pool.map(complete, range(24)))
    assert len(texts) == 1
    stream = client.completions.create(**settings, max_tokens=60, stream=True)
    assert "".join(part.choices[0].text for part in stream) in texts
    extra = {"ignore_eos": True}
    left = client.completions.create(**settings, max_tokens=1000, stream=True, extra_body=extra)
    next(iter(left))
    left.close()
    cancelled = '"outcome": "cancelled"'
    until = time.monotonic() + 30
    while cancelled not in log.read_text():
        assert time.monotonic() < until
        time.sleep(0.2)
    served = re.findall(r"pid=(\d+).*POST /v1/completions 200", log.read_text())
    assert len(set(served)) == 2
