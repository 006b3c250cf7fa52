"""Conversion: its results, and that failures and interruptions leave no trace."""

import concurrent.futures
import itertools
import json
import os
import shutil
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tiny import TEXT, add_tokenizer, logits_of, make_tiny, only, python, refuses

from benchmarks.shapes import with_plain_matrices
from infinigen_jax.checkpoint.hf_folder import open_tensors
from infinigen_jax.checkpoint.safetensors import SafetensorsWriter
from infinigen_jax.convert.__main__ import main
from infinigen_jax.convert.pipeline import convert
from infinigen_jax.errors import InputError
from infinigen_jax.loading import load as checkpoint

# Conversions out.


@pytest.mark.parametrize(
    "family, skew", [("llama", "balanced"), ("llama", "svd"), ("opt", "svd"), ("opt", "none")]
)
def test_converted_folders_load_in_transformers(family, skew, tiny, tokens, tmp_path):
    from transformers import AutoModelForCausalLM

    made = tiny(family, num_hidden_layers=1)
    calibration = None if skew == "none" else TEXT
    out = convert(made.folder, tmp_path / "out", calibration=calibration, skew=skew)
    again = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = again(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(logits, made.logits(tokens), atol=1e-4)
    before, after = (load_file(f / "model.safetensors") for f in (made.folder, out))
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    if (family, skew) == ("opt", "svd"):
        assert changed and all("q_proj" in name or "k_proj" in name for name in changed)
    else:
        assert not changed
    model = checkpoint.load(out)
    assert model.skew == skew and model.dtype == jnp.float32
    with_basis = skew != "none" and (family, skew) != ("opt", "svd")
    assert all((basis is not None) == with_basis for basis in model.bases)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes(dtype, tiny, tokens, tmp_path):
    made = tiny("opt", num_hidden_layers=1)
    arguments = (made.folder, tmp_path / "out", "--skew", "none", "--dtype", dtype)
    assert main([str(argument) for argument in arguments]) == 0
    tensors = open_tensors(tmp_path / "out")
    assert {tensor.dtype.name for tensor in tensors.values()} == {dtype}
    assert checkpoint.load(tmp_path / "out").dtype == jnp.float32  # the CPU's default
    model = checkpoint.load(tmp_path / "out", dtype)
    leaves = jax.tree.leaves(with_plain_matrices(model).params)
    assert {leaf.dtype.name for leaf in leaves} == {dtype}
    difference = np.abs(logits_of(model, tokens) - made.logits(tokens)).max()
    assert difference <= {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.5}[dtype]


def test_manifest_records_everything_and_no_path(tiny, tmp_path):
    made = tiny("llama", num_hidden_layers=1, vocab_size=1024)
    add_tokenizer(made.folder)
    config = json.loads((made.folder / "config.json").read_text())
    config["_name_or_path"] = str(made.folder)
    (made.folder / "config.json").write_text(json.dumps(config))
    out = convert(made.folder, tmp_path / "out")
    manifest = json.loads((out / "infinigen.json").read_text())
    # Of 2,048, the beginning-of-sequence tokens of as many windows as that would make are left out.
    assert manifest["format_version"] == 2 and 2040 < manifest["calibration"]["tokens"] <= 2048
    assert set(manifest["files"]) == {p.name for p in out.iterdir()} - {"infinigen.json"}
    assert set(manifest["sources"]) >= {"config.json", "model.safetensors", "tokenizer.json"}
    for file in out.glob("*.json"):
        assert str(tmp_path) not in file.read_text()
    model = checkpoint.load(out)
    assert model.tokenizer.encode("Hello") and model.tokenizer is model.tokenizer


@pytest.mark.parametrize("sharded", [False, True])
def test_unchanged_weights_are_links(sharded, tiny, tokens, tmp_path, monkeypatch):
    """They outlive the source, and a change in one is noticed. Conversions are reproducible."""
    made = tiny("llama", num_hidden_layers=1)
    if sharded:
        (made.folder / "model.safetensors").unlink()
        made.model.save_pretrained(made.folder, max_shard_size="60KB")
    expected = made.logits(tokens)
    names = {file.name for file in made.folder.glob("*.safetensors")}
    out, other = (convert(made.folder, tmp_path / n, calibration=TEXT) for n in ("out", "other"))
    assert names == {file.name for file in out.glob("model*.safetensors")}
    assert all((out / name).samefile(made.folder / name) for name in names)
    assert all(file.read_bytes() == (other / file.name).read_bytes() for file in out.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", lambda *names: (_ for _ in ()).throw(OSError(18, "other disk")))
        copied = convert(made.folder, tmp_path / "copied", skew="none")
    assert not any((copied / name).samefile(made.folder / name) for name in names)
    changed = convert(made.folder, tmp_path / "changed", skew="none", dtype="bfloat16")
    assert {t.dtype.name for t in open_tensors(changed).values()} == {"bfloat16"}
    shutil.rmtree(made.folder)
    np.testing.assert_allclose(logits_of(checkpoint.load(out), tokens), expected, atol=1e-4)
    name = min(names)
    with open(out / name, "r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"xyz")
    message = f"other/{name}: damaged, its SHA-256 is not the recorded one; convert the model again"
    refuses(message, checkpoint.load, other)
    checkpoint.load(copied)


def test_destinations_that_are_refused(tiny, tmp_path):
    made = tiny("llama", num_hidden_layers=1)

    def refused(destination: Path, message: str, force: bool = False) -> None:
        given = {"calibration": TEXT, "force": force}
        assert str(destination) in refuses(message, convert, made.folder, destination, **given)

    refused(made.folder, "same folder", force=True)
    (tmp_path / "link").symlink_to(made.folder)
    refused(tmp_path / "link", "same folder", force=True)
    refused(tmp_path, "contains the source", force=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letters.txt").write_text("dear")
    refused(tmp_path / "other", "already exists")
    refused(tmp_path / "other", "not a converted model", force=True)
    refused(tmp_path / "other" / "letters.txt", "not a converted model", force=True)
    refused(tmp_path / "other" / "letters.txt" / "out", "cannot be written")
    assert (tmp_path / "other" / "letters.txt").read_text() == "dear"
    assert only(tmp_path) == ["link", "llama", "other"]


@pytest.mark.parametrize(
    ("error", "seen", "message"),
    [
        (OSError(28, "No space left on device"), InputError, "disk is full"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
        (RuntimeError("anything"), RuntimeError, "anything"),
    ],
)
def test_a_failing_writer_leaves_what_was_there(error, seen, message, tiny, tmp_path, monkeypatch):
    """Nothing, or the earlier conversion, which is replaced only after success."""
    made = tiny("llama", num_hidden_layers=1)
    out = convert(made.folder, tmp_path / "out", calibration=TEXT)
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    refuses("already exists", convert, made.folder, out, skew="none")
    add = SafetensorsWriter.add
    for place in (out, tmp_path / "new" / "deep" / "out"):
        count = itertools.count()

        def failing(self, name, tensor, count=count):
            if next(count) == 7:
                raise error
            add(self, name, tensor)

        with monkeypatch.context() as patch, pytest.raises(seen, match=message):
            patch.setattr(SafetensorsWriter, "add", failing)
            convert(made.folder, place, calibration=TEXT, dtype="float16", force=True)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    assert only(tmp_path) == ["llama", "out"]
    convert(made.folder, out, skew="none", force=True)
    assert checkpoint.load(out).skew == "none"


def test_weights_that_are_not_finite_are_named(tiny, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(tiny("llama").folder, source)
    tensors = load_file(source / "model.safetensors")
    name = next(n for n in sorted(tensors) if "layers.1." in n and "k_proj" in n)
    tensors[name] = np.full_like(tensors[name], np.nan)
    save_file(tensors, source / "model.safetensors")
    said = "source/model.safetensors: the weights of layer 1 "
    refuses(said, convert, source, tmp_path / "out", calibration=TEXT)
    assert not (tmp_path / "out").exists()


KILLED = """
import os, signal, sys
from infinigen_jax.convert.pipeline import convert
convert(sys.argv[1], sys.argv[2], skew="none",
        progress=lambda done, total: os.kill(os.getpid(), signal.SIGTERM))
"""


@pytest.mark.slow
def test_a_terminated_conversion(tiny, tmp_path):
    """SIGTERM removes the temporary folder; `test_atomic` sends SIGKILL."""
    made = tiny("llama")
    assert python("-c", KILLED, made.folder, tmp_path / "out").returncode == 143
    assert only(tmp_path) == ["llama"]


def test_four_conversions_to_one_folder(tiny, tmp_path):
    """One process converts; the others wait and leave the result unchanged."""
    made = tiny("llama", num_hidden_layers=1)

    def attempt(_: int) -> str:
        try:
            return str(convert(made.folder, tmp_path / "out", skew="none"))
        except InputError as error:
            return str(error)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        outcomes = sorted(pool.map(attempt, range(4)), key=len)
    assert outcomes[0] == str(tmp_path / "out")
    assert all("already exists" in outcome for outcome in outcomes[1:])
    assert only(tmp_path) == ["llama", "out"]


def test_memory_is_that_of_a_layer_not_of_the_model(tmp_path):
    layers, sizes = 8, {"hidden_size": 128, "intermediate_size": 512}
    make_tiny(source := tmp_path / "source", "llama", num_hidden_layers=layers, **sizes)
    size = (source / "model.safetensors").stat().st_size
    on_device: list[int] = []

    def progress(done: int, total: int) -> None:
        on_device.append(sum(array.nbytes for array in jax.live_arrays()))

    convert(source, tmp_path / "warm", calibration=TEXT, skew="svd")  # compile and import first
    before = sum(array.nbytes for array in jax.live_arrays())
    tracemalloc.start()
    convert(source, tmp_path / "out", calibration=TEXT, skew="svd", progress=progress)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(on_device) == layers
    assert peak < 3 * size / layers
    assert max(on_device) - before < 3 * size / layers


def test_tokens_for_calibration_that_are_refused(tiny, tmp_path):
    folder, few = tiny("llama", num_hidden_layers=1).folder, [0] * 20
    for wrong in ([2**32 + 5, *few], [2**70, *few], [1.5, *few], b"\5" * 20, 7):
        refuses("calibration", convert, folder, tmp_path / "out", calibration=wrong)


def test_command_line(tiny, tmp_path, capsys, refused):
    made, text = tiny("llama", num_hidden_layers=1), tmp_path / "text"
    given = (main, made.folder, tmp_path / "out")
    assert "no tokenizer" in refused(*given)
    add_tokenizer(made.folder)
    assert "--calibration" in refused(*given, "--calibration", text)
    for content, message in (
        (b"\xff\xfe\xfa", "not UTF-8"),
        (b"short", "at least 12"),
        (b"a long enough text " * 20, "is not among the model"),  # its tokens exceed the model's 96
    ):
        text.write_bytes(content)
        assert message in refused(*given, "--calibration", text)
    assert main([str(made.folder), str(tmp_path / "out"), "--skew", "none"]) == 0
    assert "wrote" in capsys.readouterr().err
    assert only(tmp_path) == ["llama", "out", "text"]
