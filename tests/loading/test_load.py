"""Loading: embedded models and damaged conversions; `test_conversion_cache` has the others."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import TEXT, logits_of, make_tiny, refuses, text_log_probs

from infinigen_jax import evaluate, generate, plan
from infinigen_jax.checkpoint.manifest import file_record
from infinigen_jax.convert.pipeline import convert
from infinigen_jax.engine.conversation import fingerprint
from infinigen_jax.loading import load as checkpoint
from infinigen_jax.loading import room
from infinigen_jax.models.linear import split
from infinigen_jax.models.small_weights import small_dtype
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
    model = checkpoint.load(tmp_path / "out", dtype="bfloat16", weight_dtype="bfloat16")
    scales = {n: p["scale"] for n, p in model.params["layers"][0].items() if "norm" in n}
    assert {scale.dtype.name for scale in scales.values()} == {"float32"} and len(scales) == 6
    np.testing.assert_array_equal(scales["attention_post_norm"], stored[name] + 1)
    assert small_dtype(model.params["layers"][0]) == "bfloat16"
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
