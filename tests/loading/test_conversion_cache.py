"""The cache of conversions: unconverted folders, keys, remembered hashes, locks and places."""

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from tiny import add_tokenizer, logits_of, only, refuses

from infinigen_jax.checkpoint.manifest import file_record
from infinigen_jax.checkpoint.source import read_config
from infinigen_jax.convert import pipeline
from infinigen_jax.convert.pipeline import convert
from infinigen_jax.files.user_cache import keep_programs
from infinigen_jax.loading import load as checkpoint
from infinigen_jax.loading.conversion_cache import HASHES, cache_folder, cache_lock, prune
from infinigen_jax.planner.forecast import conversion_of
from infinigen_jax.text import gguf_tokenizer


def test_unconverted_folders_go_through_the_cache(tiny, tokens, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = tiny("llama", vocab_size=1024)
    add_tokenizer(made.folder)
    said: list[str] = []
    model = checkpoint.load(made.folder, notify=said.append)
    assert len(said) == 1 and "not converted" in said[0] and model.skew == "balanced"
    np.testing.assert_allclose(logits_of(model, tokens), made.logits(tokens), atol=1e-4)
    assert checkpoint.load(made.folder, notify=said.append).path == model.path
    assert len(said) == 1
    assert not list(model.path.glob("model*"))  # the weights are the source's
    refuses("has no weights; give the model that it was converted", checkpoint.load, model.path)
    (model.path / "infinigen_ahead.safetensors").write_bytes(b"damaged")
    again = checkpoint.load(made.folder, notify=said.append)
    assert again.path == model.path and "again" in said[1]
    (model.path / "infinigen.json").unlink()
    again = checkpoint.load(made.folder, notify=said.append)
    assert again.path == model.path and "again" in said[2]
    assert str(tmp_path / "cache") in str(model.path) and len(said) == 3
    with monkeypatch.context() as patch:  # a cache that cannot be written has no lock
        patch.setattr(checkpoint, "cache_lock", lambda *_: pytest.fail("took the lock"))
        assert checkpoint.load(made.folder).path == model.path
    checks = [FileNotFoundError, mock.DEFAULT]  # another process removes and makes it again
    with mock.patch.object(checkpoint, "verify_files", side_effect=checks):
        assert checkpoint.load(made.folder, notify=said.append).path == model.path
    assert only(tmp_path / "cache" / "infinigen_jax") == [model.path.name] and len(said) == 3


def test_a_source_that_changes_meanwhile_is_not_converted(tiny, tmp_path, monkeypatch):
    """By a download, before the conversion reads it or while it does."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tiny("llama", vocab_size=1024, num_hidden_layers=1).folder
    add_tokenizer(folder)
    config = folder / "config.json"

    def late(*arguments: Any, **options: Any) -> None:
        config.write_text(config.read_text() + " ")
        convert(*arguments, **options)

    with mock.patch.object(pipeline, "convert", late):
        refuses("changed before they were converted", checkpoint.load, folder)

    def progress(done: int, total: int) -> None:
        os.utime(config, (1, 1))

    changing = tmp_path / "out", {"progress": progress}
    refuses("changed during the conversion", convert, folder, changing[0], **changing[1])
    assert not (tmp_path / "out").exists() and not only(tmp_path / "cache" / "infinigen_jax")


def test_the_cache_goes_by_content(tiny, tmp_path, monkeypatch):
    """Times, places and unread files have no effect."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("infinigen_jax.loading.conversion_cache.LARGE", 1)
    folder, copy = tiny("llama", num_hidden_layers=1).folder, tmp_path / "copy"
    for file in folder.iterdir():
        os.utime(file, (10**9, 10**9))
    key = cache_folder(folder)
    (folder / "README.md").write_text("other")
    os.utime(folder / "config.json")
    shutil.copytree(folder, copy)
    assert cache_folder(folder) == cache_folder(copy) == key
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        data = (copy / name).read_bytes() if (copy / name).exists() else b"x"
        (copy / name).write_bytes(data[:-1] + b" ")
        os.utime(copy / name, (10**9, 10**9))
        assert cache_folder(copy) != key
        key = cache_folder(copy)
    (file := tmp_path / "model.gguf").write_text("x")
    key = cache_folder(file)
    monkeypatch.setattr(gguf_tokenizer, "__file__", str(file))  # another version of it
    assert cache_folder(file) != key


@pytest.fixture
def hashed(tmp_path, monkeypatch) -> list[str]:
    """Names of the files hashed so far; those of any size and age are remembered."""
    monkeypatch.setattr("infinigen_jax.loading.conversion_cache.LARGE", 1)
    monkeypatch.setattr("infinigen_jax.loading.conversion_cache.SETTLED", -1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names: list[str] = []

    def sha256(path: Path) -> str:
        names.append(path.name)
        return file_record(path)["sha256"]

    monkeypatch.setattr("infinigen_jax.loading.conversion_cache.file_sha256", sha256)
    return names


def test_hashes_of_large_files_are_remembered(tmp_path, monkeypatch, hashed):
    """Until the file may have changed; not of one that changed just before."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text(name)
    first = cache_folder(tmp_path)
    assert cache_folder(tmp_path) == first and hashed == ["config.json", "model.safetensors"]
    (tmp_path / "model.safetensors").write_text("x" * len("model.safetensors"))
    os.utime(tmp_path / "model.safetensors", (1, 1))
    assert cache_folder(tmp_path) != first and hashed[2:] == ["model.safetensors"]
    (tmp_path / "cache" / "infinigen_jax" / HASHES).write_text("damaged")
    monkeypatch.setattr("infinigen_jax.loading.conversion_cache.SETTLED", 3600)
    cache_folder(tmp_path)
    cache_folder(tmp_path)
    assert len(hashed) == 7


def test_files_of_a_folder_are_hashed_again_if_they_changed(tiny, tmp_path, monkeypatch, hashed):
    def no_home() -> Path:
        raise FileNotFoundError

    folder = convert(tiny("llama").folder, tmp_path / "model", skew="none")
    checkpoint.load(folder)
    assert "model.safetensors" in hashed
    hashed.clear()
    checkpoint.load(folder)
    assert not hashed
    status = (folder / "model.safetensors").stat()
    with open(folder / "model.safetensors", "r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"xyz")
    os.utime(folder / "model.safetensors", ns=(status.st_atime_ns, status.st_mtime_ns))
    refuses("model.safetensors: damaged, its SHA-256", checkpoint.load, folder)
    assert hashed == ["model.safetensors"]
    monkeypatch.setattr("infinigen_jax.loading.conversion_cache.cache_root", no_home)
    refuses("model.safetensors: damaged, its SHA-256", checkpoint.load, folder)


def test_a_plan_uses_a_conversion_in_the_cache(tiny, tmp_path, monkeypatch):
    """Without reading weights: the hash of a large file has to be remembered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = add_tokenizer(tiny("llama", vocab_size=1024).folder)
    config = read_config(folder)[1]
    assert conversion_of(folder, config).assumed
    model, found = checkpoint.load(folder), conversion_of(folder, config)
    assert not found.assumed and found.losses
    for name, values in found.losses.items():
        np.testing.assert_array_equal(values, getattr(model, name))
    monkeypatch.setattr("infinigen_jax.loading.conversion_cache.LARGE", 1)
    assert conversion_of(folder, config).assumed
    monkeypatch.setattr("infinigen_jax.loading.conversion_cache.SETTLED", -1)
    cache_folder(folder)
    assert not conversion_of(folder, config).assumed
    (folder / "model.safetensors").unlink()  # as on the hub, before weights are downloaded
    assert conversion_of(folder, config).assumed


def test_conversions_used_least_recently_are_removed(tmp_path):
    """Beyond a limit in bytes, with leftovers of killed processes; never one in progress."""
    names = [f"{number:032x}" for number in range(5)]
    for age, name in enumerate(names):
        (tmp_path / name).mkdir()
        (tmp_path / name / "infinigen.json").write_bytes(bytes(100))
        os.utime(tmp_path / name, (10**9 - age, 10**9 - age))
    for name in (f".{'f' * 32}.partial-x", f"{'f' * 32}.lock"):
        (tmp_path / name).touch()
    with cache_lock(tmp_path / names[4], pytest.fail):  # another process makes it
        prune(tmp_path, 250)
        assert (tmp_path / names[4]).exists()
    assert only(tmp_path) == [*names[:2], names[4]]


def test_the_conversion_of_another_process_is_awaited(tmp_path):
    said: list[str] = []

    def convert() -> None:
        with cache_lock(tmp_path / "key", said.append):
            said.append("converting")

    with cache_lock(tmp_path / "key", pytest.fail):
        other = threading.Thread(target=convert)
        other.start()
        while not said:
            time.sleep(0.01)
        assert len(said) == 1 and "waiting for another process" in said[0]
    other.join(10)
    assert said[1:] == ["converting"]


def test_a_cache_that_cannot_be_written(tiny, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    refuses("XDG_CACHE_HOME", checkpoint.load, tiny("llama").folder)


def test_a_user_without_a_home_folder(tiny, monkeypatch):
    """In such a container everything except the cache works; the message names the remedy."""

    def unknown(_: int) -> None:
        raise KeyError

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    keep_programs()
    assert checkpoint.load().path == checkpoint.embedded()
    folder = tiny("llama", num_hidden_layers=1).folder
    refuses("no home folder .*; set XDG_CACHE_HOME", checkpoint.load, folder)
    refuses("~/model: no such folder", checkpoint.load, "~/model")


def test_a_cache_of_another_user(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder, exists = tiny("llama").folder, Path.exists
    conversion = cache_folder(folder)

    def refused(path: Path, **options: bool) -> bool:
        if path == conversion:
            raise PermissionError(13, "Permission denied")
        return exists(path, **options)

    monkeypatch.setattr(Path, "exists", refused)
    refuses(f"{tmp_path}.*: permission denied; set XDG_CACHE_HOME", checkpoint.load, folder)
