"""A server that is killed leaves no damaged file: the next one answers as before. Two replicas."""

import concurrent.futures
import hashlib
import json
import pickle
import re
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tiny import ROOT, environment, started

from infinigen_jax.programs.program import DIGEST

pytestmark = pytest.mark.slow
SERVE = "-m infinigen_jax.serve --model tiny-llama --port 0 --batch 2 --no-page".split()
SERVE += ["--context", "512"]


class Process:
    """Server in a separate process, with its log in a folder."""

    def __init__(self, folder: Path, *command: str | Path, **variables: Any):
        self._log = folder / "log"
        with open(self._log, "w") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "cwd": ROOT}
            self._process = started(*command, env=environment(**variables), **streams)

    def wait(self, condition: Callable[[], bool], seconds: float = 300) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until and self._process.poll() is None, self._log.read_text()
            time.sleep(0.01)

    def url(self, path: str) -> str:
        self.wait(lambda: "http://" in self._log.read_text())
        found = re.search(r"http://\S+", self._log.read_text())
        return found[0] + path

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url("/health")) as answer:
                return answer.status == 200
        except OSError:
            return False

    def stream(self, tokens: int) -> Iterator[str]:
        body = {"model": "tiny-llama", "prompt": "Once upon a time", "max_tokens": tokens}
        body |= {"temperature": 0, "stream": True, "ignore_eos": True}
        headers = {"Content-Type": "application/json"}
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url("/v1/completions"), data, headers)
        with urllib.request.urlopen(request) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])["choices"][0]["text"]

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


def test_a_second_ctrl_c_ends_the_warm_up(tmp_path: Path):
    server = Process(tmp_path, *SERVE, cache=tmp_path)
    server.url("/")
    time.sleep(2)  # while it compiles
    for _ in range(2):
        server._process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    assert server._process.wait(2) == 130
    said = server._log.read_text()
    assert said.endswith("interrupted\n") and "ready" not in said


def test_killed_servers_leave_no_damaged_file(tmp_path: Path):
    """Killed while it writes compiled programs, and while it streams an answer."""

    def programs() -> list[Path]:
        return sorted(tmp_path.rglob("*.program"))

    def written(server: Process, number: int) -> Callable[[], bool]:
        return lambda: len(programs()) >= number or server.ready()

    for number in (1, 8, 20):
        server = Process(tmp_path, *SERVE, cache=tmp_path)
        try:
            server.wait(written(server, number))
        finally:
            server.kill()
    texts = []
    for tokens in (400, 40):
        server = Process(tmp_path, *SERVE, cache=tmp_path)
        try:
            server.wait(server.ready)
            stream = server.stream(tokens)
            texts.append("".join(next(stream) for _ in range(30)))
        finally:
            server.kill()
    assert texts[0] == texts[1] != ""
    for path in programs():
        content = path.read_bytes()
        assert hashlib.sha256(content[DIGEST:]).digest() == content[:DIGEST]
        assert pickle.loads(content[DIGEST:])


RAY = "--context 1024 --batch 4 --replicas 2 --replica-cpus 0.5 --no-page".split()
RAY += ["--policy", "infinigen:window=8"]


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[tuple[Any, Process]]:
    """A client of two replicas, and their process, whose log has a line of every request."""
    pytest.importorskip("ray.serve")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = ("-u", ROOT / "deploy/ray_serve.py", "--model", "tiny-llama", "--port", port, *RAY)
    server = Process(tmp_path, *command, RAY_DEDUP_LOGS="0")
    try:
        server.wait(lambda: f"http://127.0.0.1:{port}\n" in server._log.read_text())
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x"), server
        server._process.send_signal(signal.SIGTERM)
        assert server._process.wait(60) == 0, server._log.read_text()
    finally:
        server.kill()


def test_two_replicas(replicas):
    """Both answer, alike and in streams; a client that goes away frees its sequence."""
    client, server = replicas
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
    server.wait(lambda: '"outcome": "cancelled"' in server._log.read_text(), 30)
    served = re.findall(r"pid=(\d+).*POST /v1/completions 200", server._log.read_text())
    assert len(set(served)) == 2
