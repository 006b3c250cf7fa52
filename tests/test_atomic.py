"""Files and folders appear whole or not at all: processes killed at every operation on a file."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny import ROOT, make_tiny, only

from infinigen_jax import atomic
from infinigen_jax.atomic import staged, whole_file, write_text
from infinigen_jax.convert import convert
from infinigen_jax.errors import InputError


def killed(what: str, folder: Path) -> tuple[list[str], list[str]]:
    """What a program that is killed at each of its operations leaves; at which it was killed."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/kills.py"), what, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    found = [line for line in lines if "found" in line]
    assert [line["status"] for line in found][-1] == 0, done.stderr
    return [line["found"] for line in found], [line["at"] for line in lines if "at" in line]


@pytest.mark.parametrize(
    "how",
    ["conversion", pytest.param("conversion_without_exchange", marks=pytest.mark.slow)],
)
def test_a_conversion_killed_anywhere_leaves_the_old_one_or_the_new_one(how, tmp_path):
    make_tiny(tmp_path / "llama", "llama", num_hidden_layers=1)
    convert(tmp_path / "llama", tmp_path / "out", skew="none")
    found, at = killed(how, tmp_path)
    assert len(at) > 15 and set(found) == {"float32", "float16"}
    assert found == sorted(found, reverse=True)  # once there, the new one stays
    assert ("ctypes.dlsym" in at) == (how == "conversion") and "os.rename" not in at[:10]
    assert only(tmp_path) == ["llama", "out"]


def test_a_file_killed_anywhere_is_the_old_one_or_the_new_one(tmp_path):
    (tmp_path / "file").write_text("old")
    found, at = killed("file", tmp_path)
    assert len(at) >= 3 and set(found) == {"old", "new"}
    assert only(tmp_path) == ["file"]


def test_measurements_killed_anywhere_are_whole_or_absent(tmp_path):
    found, at = killed("parts", tmp_path)
    assert len(at) >= 4 and set(found) == {"old", "new"}
    assert len(only(tmp_path / "result.json.parts")) == 1


def test_a_conversation_killed_anywhere_is_the_old_one_or_the_new_one(tmp_path):
    found, at = killed("saved", tmp_path)
    assert len(at) >= 3 and set(found) == {"old", "new"} and found == sorted(found, reverse=True)
    assert only(tmp_path) == ["talk"]


def test_failures_leave_nothing(tmp_path):
    with pytest.raises(RuntimeError), whole_file(tmp_path / "file") as file:
        file.write(b"half")
        raise RuntimeError
    with pytest.raises(InputError, match="disk is full"), staged(tmp_path / "new" / "folder"):
        raise OSError(28, "No space left on device")
    with pytest.raises(FileNotFoundError), whole_file(tmp_path / "absent" / "file"):
        pass
    assert only(tmp_path) == []


def test_a_living_writer_is_left_alone(tmp_path):
    path = tmp_path / "[a]*"  # not a pattern
    (tmp_path / ".[a]*.partial-dead").write_text("of a killed process")
    with whole_file(path) as first:
        first.write(b"first")
        with whole_file(path) as second:
            second.write(b"second")
        assert path.read_bytes() == b"second" and len(only(tmp_path)) == 2
    assert path.read_bytes() == b"first" and only(tmp_path) == ["[a]*"]
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_folder_replaces_another(exchanges, tmp_path, monkeypatch):
    if not exchanges:
        monkeypatch.setattr(atomic, "_exchange", lambda first, second: False)
    for number in ("one", "two"):
        with staged(tmp_path / "folder") as folder:
            write_text(folder / number, number)
        assert only(tmp_path / "folder") == [number] and only(tmp_path) == ["folder"]
