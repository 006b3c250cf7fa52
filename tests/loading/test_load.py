"""Loading: embedded models, damaged conversions, and the cache for unconverted folders."""

import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import TEXT, add_tokenizer, logits_of, make_tiny, only, refuses, text_log_probs

from infinigen_jax import evaluate, generate, plan
from infinigen_jax.checkpoint.manifest import file_record
from infinigen_jax.checkpoint.source import read_config
from infinigen_jax.convert import pipeline
from infinigen_jax.convert.pipeline import convert
from infinigen_jax.engine.conversation import fingerprint
from infinigen_jax.files.user_cache import keep_programs
from infinigen_jax.loading import load as checkpoint
from infinigen_jax.loading import room
from infinigen_jax.loading.conversion_cache import HASHES, cache_folder, cache_lock, prune
from infinigen_jax.models.linear import split
from infinigen_jax.planner.forecast import conversion_of
from infinigen_jax.text import gguf_tokenizer
from infinigen_jax.transfer.host_weights import STAYS


@pytest.mark.parametrize("name", checkpoint.EMBEDDED)
def test_embedded_models(name):
    folder = checkpoint.embedded(name)
    model = checkpoint.load(folder)
    assert model.skew == "balanced" and model.config.head_dim == 32
    ids = np.asarray([model.tokenizer.encode("It was a dark and stormy night.")], np.int32)
    assert -text_log_probs(model, ids).mean() < 5.5  # a guess among 1024 tokens costs 6.9
    text = "".join(f.read_text() for f in folder.glob("*.json"))
    assert not [word for word in ("/home", "/root", "/tmp", "/work") if word in text]
    refuses("no embedded model", checkpoint.embedded, "gpt")


def test_scales_of_gemma_keep_their_digits(tiny, tmp_path):
    """They are stored minus 1; 1 + scale in bfloat16 would lose most of them."""
    sizes = {"head_dim": 16, "sliding_window": 7}
    made = tiny("gemma3_text", **sizes, layer_types=["sliding_attention", "full_attention"])
    name = "model.layers.0.post_attention_layernorm.weight"
    stored = load_file(made.folder / "model.safetensors")
    stored[name] = np.linspace(-0.01, 0.01, len(stored[name]), dtype=np.float32)
    save_file(stored, made.folder / "model.safetensors", metadata={"format": "pt"})
    convert(made.folder, tmp_path / "out", skew="none")
    model = checkpoint.load(tmp_path / "out", dtype="bfloat16")
    scales = {n: p["scale"] for n, p in model.params["layers"][0].items() if "norm" in n}
    assert {scale.dtype.name for scale in scales.values()} == {"float32"} and len(scales) == 6
    np.testing.assert_array_equal(scales["attention_post_norm"], stored[name] + 1)
    assert model.params["layers"][0]["down"]["weight"].dtype.name == "bfloat16"
    logits = logits_of(model, np.array([[1, 2, 3]], np.int32))
    assert np.isfinite(logits).all()


def test_embedded_models_by_name(command, tmp_path, monkeypatch):
    """A folder of that name goes first, and every command says which names there are."""
    monkeypatch.chdir(tmp_path)
    assert checkpoint.model_folder(None) == checkpoint.embedded("books-llama")
    for name in checkpoint.EMBEDDED:
        assert checkpoint.model_folder(name) == checkpoint.embedded(name)
        for main, *sub in ((generate.main,), (plan.main,), (evaluate.main, "perplexity")):
            status, out, _ = command(main, *sub, "--help")
            assert status == 0 and name in out
    assert checkpoint.load("tiny-opt").path == checkpoint.embedded("tiny-opt")
    given = ("--model", "tiny-opt", "--context", "64", "--device-memory", "1", "--host-memory", "1")
    rates = ("--device-bandwidth", "1000", "--copy-bandwidth", "10")
    assert command(plan.main, *given, *rates)[0] == 0
    (tmp_path / "tiny-opt").mkdir()
    status, out, err = command(plan.main, *given, *rates)
    assert status == 2 and not out and "config.json" in err
    assert "config.json" in command(generate.main, "--model", "tiny-opt", "--quiet")[2]


@pytest.mark.usefixtures("shallow")
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-opt"])
def test_loading_onto_the_host(name):
    """All matrices except those that make queries."""
    folder = checkpoint.embedded(name)
    there, here = (checkpoint.load(folder, weights=place) for place in ("host", "device"))
    width = here.config.query_width
    layers = [split(layer, width) for layer in here.params["layers"]]
    for layer, other in zip(there.params["layers"], layers, strict=True):
        for part, parameters in layer.items():
            for x in jax.tree.leaves(parameters):
                moved = part not in STAYS and x.ndim == 2
                assert x.sharding.memory_kind == ("pinned_host" if moved else "device"), part
        assert {x.sharding.memory_kind for x in jax.tree.leaves(other)} == {"device"}
    expected = here.params | {"layers": layers}
    jax.tree.map(np.testing.assert_array_equal, there.params, expected)


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    return convert(make_tiny(folder / "llama", "llama").folder, folder / "out", calibration=TEXT)


@pytest.fixture
def out(converted, tmp_path) -> Path:
    """Return a copy of a converted folder."""
    return shutil.copytree(converted, tmp_path / "out")


def test_every_damaged_file_of_a_conversion_is_named(out):
    names = "model.safetensors infinigen.safetensors infinigen_ahead.safetensors config.json"
    for name in names.split():
        whole = (out / name).read_bytes()
        flipped = bytearray(whole)
        flipped[-3] ^= 1
        for data in (bytes(flipped), whole[:-1], None):
            if data is None:
                (out / name).unlink()
            else:
                (out / name).write_bytes(data)
            assert str(out / name) in refuses("convert the model again", checkpoint.load, out)
        (out / name).write_bytes(whole)
    checkpoint.load(out)


def test_damaged_manifest(out):
    file = out / "infinigen.json"
    whole = json.loads(file.read_text())
    for change, message in (
        ({"format_version": 1}, "format version 1"),
        ({"skew": "other"}, "'other' is unknown"),
        ({"files": None}, "damaged"),
        ({"wide": 5}, "damaged"),
        ({"files": {"../x": {"sha256": "", "size": 1}}}, "'../x' is not a file name"),
        ({"files": {"config.json": {"sha256": "", "size": 1}}}, "without infinigen.safetensors"),
    ):
        file.write_text(json.dumps(whole | change))
        refuses(message, checkpoint.load, out)
    file.write_text("{")
    refuses("not valid JSON", checkpoint.load, out)


def test_a_conversion_of_another_version_can_be_converted_again(out, tmp_path):
    file = out / "infinigen.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format_version": 1, "wide": 5}))
    checkpoint.load(convert(out, tmp_path / "again", skew="none"))


def test_damaged_bases(out):
    path = out / "infinigen.safetensors"
    whole = load_file(path)

    def refused(arrays: dict[str, np.ndarray], message: str) -> None:
        save_file(arrays, path)
        manifest = json.loads((out / "infinigen.json").read_text())
        manifest["files"][path.name] = file_record(path)  # as if the converter had written it so
        (out / "infinigen.json").write_text(json.dumps(manifest))
        assert str(path) in refuses(message, checkpoint.load, out)

    refused({k: v for k, v in whole.items() if k != "key_basis"}, "key_basis is missing")
    refused(whole | {"key_mean": whole["key_mean"][:, :1]}, "key_mean is float32")
    uncorrected = {k: v for k, v in whole.items() if not k.startswith("ahead")}
    refused(uncorrected, "ahead_query_basis is missing .*; convert the model again")


def test_a_conversion_without_tokenizer_says_so_when_asked(tiny, tmp_path):
    model = checkpoint.load(convert(tiny("opt").folder, tmp_path / "out", skew="none"))
    refuses("no tokenizer", getattr, model, "tokenizer")
    (tmp_path / "out" / "tokenizer.json").write_text("{}")
    refuses("cannot be used", getattr, model, "tokenizer")


def test_arguments_that_are_refused():
    refuses("path 5: give a name or a path", checkpoint.load, 5)
    refuses("int8", checkpoint.load, checkpoint.embedded(), "int8")
    wrong = "weight_dtype int3: use bfloat16, int8 or int4"
    refuses(wrong, checkpoint.load, weight_dtype="int3")


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


def test_a_model_is_known_by_the_files_that_were_loaded(out):
    model = checkpoint.load(out)
    known = fingerprint(model)
    shutil.rmtree(out)
    assert fingerprint(model) == known


def test_a_model_that_does_not_fit_is_not_converted(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(room, "available_device_bytes", lambda device: 1000)
    said: list[str] = []
    folder = tiny("llama").folder
    refuses("the weights need .* of memory", checkpoint.load, folder, notify=said.append)
    assert not said and not list((tmp_path / "cache").rglob("*.safetensors"))


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


def test_a_conversion_that_lost_its_manifest_is_not_taken_for_a_source(tmp_path):
    out = shutil.copytree(checkpoint.embedded("tiny-opt"), tmp_path / "out")
    (out / "infinigen.json").unlink()
    refuses("infinigen.json: missing", checkpoint.load, out)


def test_64_bits_are_refused():
    jax.config.update("jax_enable_x64", True)
    try:
        refuses("JAX_ENABLE_X64: .* of 32 bits", checkpoint.load)
    finally:
        jax.config.update("jax_enable_x64", False)


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
