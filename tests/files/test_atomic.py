"""Files and folders appear whole or not at all: processes killed at every operation on a file."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from tiny import ROOT, make_tiny, only, python, refuses, started

from infinigen_jax.convert.pipeline import convert
from infinigen_jax.errors import InputError
from infinigen_jax.files import atomic
from infinigen_jax.files.atomic import locked, staged, whole_file, write_if_possible, write_text
from infinigen_jax.files.output import checked_output, is_open


def killed(what: str, folder: Path) -> tuple[list[str], list[str]]:
    """Kill a program at each file operation; return the states found and the operations."""
    done = python(ROOT / "tests/kills.py", what, folder)
    assert done.returncode == 0, done.stderr
    lines: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    found = [line for line in lines if "found" in line]
    assert [line["status"] for line in found][-1] == 0, done.stderr
    return [line["found"] for line in found], [line["at"] for line in lines if "at" in line]


@pytest.mark.parametrize(
    "what, operations, files", [("folder", 6, 2), ("file", 3, 0), ("parts", 4, 1), ("saved", 3, 0)]
)
def test_what_is_killed_anywhere_is_the_old_one_or_the_new_one(what, operations, files, tmp_path):
    """A folder, a file, measurements and a conversation; nothing else is left."""
    found, at = killed(what, tmp_path)
    assert len(at) >= operations and set(found) == {"old", "new"}
    assert found == sorted(found, reverse=True)  # once there, the new one stays
    (left,) = only(tmp_path)
    assert len(only(tmp_path / left) if files else []) == files


@pytest.mark.slow
def test_a_conversion_killed_anywhere_leaves_the_old_one_or_the_new_one(tmp_path):
    make_tiny(tmp_path / "llama", "llama", num_hidden_layers=1)
    convert(tmp_path / "llama", tmp_path / "out", skew="none")
    found, at = killed("conversion", tmp_path)
    assert len(at) > 15 and set(found) == {"float32", "float16"}
    assert found == sorted(found, reverse=True)
    assert "ctypes.dlsym" in at and "os.rename" not in at
    assert only(tmp_path) == ["llama", "out"]


def test_failures_leave_nothing(tmp_path):
    with pytest.raises(RuntimeError), whole_file(tmp_path / "file") as file:
        file.write(b"half")
        raise RuntimeError
    with pytest.raises(InputError, match="disk is full"), staged(tmp_path / "new" / "folder"):
        raise OSError(28, "No space left on device")
    with pytest.raises(FileNotFoundError), whole_file(tmp_path / "absent" / "file"):
        pass
    assert only(tmp_path) == []


WRITER = """
import sys
from pathlib import Path
from infinigen_jax.files.atomic import staged, whole_file, write_text
folder = Path(sys.argv[1])
sys.stdin.readline()
for _ in range(25):
    with whole_file(folder / "file") as file:
        file.write(b"whole")
    with staged(folder / "folder") as out:
        write_text(out / "inside", "whole")
"""


def test_concurrent_writers_take_turns(tmp_path):
    """No writer takes another one's unfinished output for that of a killed process."""
    writers = [started("-c", WRITER, tmp_path) for _ in range(4)]
    for writer in writers:  # all have imported what they need
        writer.stdin.write(b"go\n")
        writer.stdin.flush()
    assert [writer.communicate()[1] for writer in writers] == [b""] * 4
    assert only(tmp_path) == ["file", "folder"]
    assert (tmp_path / "file").read_text() + only(tmp_path / "folder")[0] == "wholeinside"


def test_what_killed_writers_left_is_removed(tmp_path):
    path = tmp_path / "[a]*"  # not a pattern
    (tmp_path / ".[a]*.partial-dead").write_text("of a killed process")
    (tmp_path / ".[a]*.lock").touch()
    with whole_file(path) as file:
        file.write(b"new")
        assert len(only(tmp_path)) == 2  # its lock and its unfinished file
    assert path.read_bytes() == b"new" and only(tmp_path) == ["[a]*"]
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_file_keeps_its_permissions(tmp_path):
    path = tmp_path / "file"
    path.touch(0o600)
    with whole_file(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new" and path.stat().st_mode & 0o777 == 0o600


def test_a_file_of_a_cache_does_not_wait_for_a_lock(tmp_path):
    with locked(tmp_path / ".file.lock"):
        write_if_possible(tmp_path / "file", b"of no importance")
    assert not only(tmp_path)


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_folder_replaces_another(exchanges, tmp_path, monkeypatch):
    if not exchanges:
        monkeypatch.setattr(atomic, "_exchange", lambda first, second: False)
    for number in ("one", "two"):
        with staged(tmp_path / "folder") as folder:
            write_text(folder / number, number)
        assert only(tmp_path / "folder") == [number] and only(tmp_path) == ["folder"]


def test_a_file_system_that_cannot_sync_folders(tmp_path, monkeypatch):
    sync = os.fsync

    def refusing(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(handle)

    monkeypatch.setattr(os, "fsync", refusing)
    with staged(tmp_path / "folder") as folder:
        write_text(folder / "file", "text")
    assert only(tmp_path / "folder") == ["file"]


def test_a_result_goes_to_a_pipe_in_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr("os.access", lambda path, mode: Path(path).name == "pipe")
    assert checked_output("json", str(tmp_path / "pipe")) == tmp_path / "pipe"
    assert is_open(Path("/dev/stdout"))  # here a file that stdout is redirected to
    for refused in (tmp_path / "file", tmp_path, tmp_path / "missing" / "file"):
        refuses("^json .*: cannot be written", checked_output, "json", str(refused))
