"""The user's cache: its place, its contents, and their removal."""

import os
from pathlib import Path

import jax
import pytest
from tiny import python

from infinigen_jax.files import user_cache
from infinigen_jax.files.user_cache import (
    cache_root,
    keep_programs,
    processor,
    program_folder,
    prune,
    prune_programs,
)


def test_it_is_in_the_users_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "infinigen_jax"
    for unset in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert cache_root() == Path.home() / ".cache" / "infinigen_jax"


def test_processors_with_other_instructions_have_other_programs(monkeypatch, tmp_path: Path):
    texts = "model name\t: A\nflags\t: x\ncpu MHz\t: 1", "CPU part\t: 0x1", "Features\t: sve"
    names = set()
    for number, text in enumerate([*texts, texts[0].replace("MHz\t: 1", "MHz\t: 2")]):
        file = tmp_path / str(number)
        file.write_text(text)
        monkeypatch.setattr(user_cache, "CPU_INFO", file)
        names.add(processor.__wrapped__())
    assert len(names) == len(texts)


def test_what_was_used_least_recently_gives_way(tmp_path: Path):
    for age in range(5):
        file = tmp_path / str(age % 2) / f"{age}-cache"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(bytes(100))
        os.utime(file, (10**9 - age, 10**9 - age))
    prune(tmp_path, 250)
    assert {file.name for file in tmp_path.rglob("*-cache")} == {"0-cache", "1-cache"}
    prune(tmp_path / "none", 0)


def test_programs_are_in_no_folder_that_others_can_write_to(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    assert program_folder() == tmp_path
    tmp_path.chmod(0o777)
    assert program_folder() is None
    tmp_path.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    assert program_folder() == (None if tmp_path.stat().st_uid else tmp_path)  # root is trusted
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "gs://bucket/folder")
    monkeypatch.chdir(tmp_path)
    assert program_folder() is None and not list(tmp_path.iterdir())


def test_an_empty_variable_is_none(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    monkeypatch.setattr("infinigen_jax.files.user_cache.LIMIT", 0)
    folder = program_folder()
    assert folder is not None and folder.is_relative_to(tmp_path)
    (folder / "old").write_text("x")
    prune_programs()
    assert not list(folder.iterdir())


def test_a_users_choice_and_a_read_only_folder_are_left_alone(monkeypatch, tmp_path):
    before = getattr(jax.config, FOLDER)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "mine")
    keep_programs()
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        keep_programs()
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert not list(tmp_path.iterdir())
    (tmp_path / "infinigen_jax").write_text("in the way")
    keep_programs()
    assert getattr(jax.config, FOLDER) == before


FOLDER = "jax_compilation_cache_dir"
PROGRAM = """
import jax
from infinigen_jax.files import user_cache
user_cache.WORTH_KEEPING = 0.0
user_cache.keep_programs()
print(jax.jit(lambda x: x * 3 + 1)(jax.numpy.arange(4)))
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ("-c", PROGRAM),
        pytest.param(
            ("-m", "infinigen_jax.generate", "--max-new-tokens", "3", "--quiet"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_second_run_compiles_nothing_again(arguments, tmp_path: Path):
    """And prints the same, with nothing about it on stderr."""
    programs, printed = [], []
    for _ in range(2):
        done = python(*arguments, cache=tmp_path)
        assert done.returncode == 0, done.stderr
        printed.append((done.stdout, done.stderr))
        programs.append(sorted((tmp_path / "infinigen_jax/programs" / processor()).iterdir()))
    assert programs[0] and programs[0] == programs[1]
    assert printed[0][0] and printed[0] == printed[1] and not printed[0][1]
