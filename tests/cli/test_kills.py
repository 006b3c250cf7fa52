"""Commands killed at random moments: their files are whole or absent, and they can resume."""

import json
import random
import subprocess
import time
from pathlib import Path

import pytest
from tiny import only, started

from infinigen_jax.convert.calibrate import DEFAULT_TEXT
from infinigen_jax.engine.saved_file import SavedFile

pytestmark = pytest.mark.slow

KILLS = 20


def start(module: str, *arguments: str | Path) -> subprocess.Popen[bytes]:
    return started("-m", f"infinigen_jax.{module}", *arguments, stdin=subprocess.DEVNULL)


def finish(process: subprocess.Popen[bytes]) -> None:
    errors = process.communicate()[1].decode()
    assert process.returncode == 0, errors


def kill(process: subprocess.Popen[bytes]) -> bool:
    """Kill a process; return whether it still ran."""
    process.kill()
    process.communicate()
    return process.returncode < 0


def test_saving_a_conversation(shallow_folder, tmp_path):
    rng, killed, path = random.Random(1), 0, tmp_path / "talk"
    arguments = ("--chat", "--chat-template", "plain", "--prompt", "Once upon a time")
    arguments += ("--max-new-tokens", "8", "--model", shallow_folder / "tiny-llama", "--save", path)
    finish(start("generate", *arguments))
    lock = tmp_path / ".talk.lock"
    for _ in range(KILLS):
        lock.unlink(missing_ok=True)
        process = start("generate", *arguments)
        while not lock.exists() and process.poll() is None:
            time.sleep(0.0005)
        time.sleep(rng.uniform(0, 0.02))
        killed += kill(process)
        assert SavedFile(path).record
    assert killed > KILLS // 2
    finish(start("generate", *arguments))
    assert only(tmp_path) == ["talk"]


def test_evaluating(shallow_folder, tmp_path):
    """Killed at random moments; the last run resumes the others, with the same result."""
    rng, killed = random.Random(2), 0
    arguments = ("perplexity", "--text", DEFAULT_TEXT, "--window", "48", "--windows", "2")
    arguments += ("--budget", "0.1", "0.3", "--model", shallow_folder / "tiny-llama")
    arguments += ("--policy", "infinigen:window=8", "--quiet", "--json")
    finish(start("evaluate", *arguments, tmp_path / "whole"))  # compiles for the others
    began = time.monotonic()
    finish(start("evaluate", *arguments, tmp_path / "whole"))
    seconds = time.monotonic() - began
    for _ in range(KILLS):
        process = start("evaluate", *arguments, tmp_path / "result")
        time.sleep(rng.uniform(0.3, 1) * seconds)
        killed += kill(process)
        if (tmp_path / "result").exists():
            json.loads((tmp_path / "result").read_text())
            (tmp_path / "result").unlink()
    assert killed > KILLS // 2
    finish(start("evaluate", *arguments, tmp_path / "result"))
    assert only(tmp_path) == ["result", "whole"]
    texts = ((tmp_path / name).read_text() for name in ("whole", "result"))
    whole, result = (json.loads(text)["configurations"] for text in texts)
    assert [entry["perplexity"] for entry in whole] == [entry["perplexity"] for entry in result]
