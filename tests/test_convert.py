"""Conversion: what goes in and comes out, and that damage and interruptions leave no trace."""

import collections
import json
import os
import shutil
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tiny import logits_of

from infinigen_jax import checkpoint
from infinigen_jax.convert import convert
from infinigen_jax.convert.__main__ import main
from infinigen_jax.convert.mapping import expected, match, write_tree
from infinigen_jax.convert.reader import open_tensors
from infinigen_jax.errors import InputError
from infinigen_jax.models import blueprint, config_from_hf, random_params
from infinigen_jax.safetensors_io import SafetensorsWriter

TEXT = [int(i) for i in np.random.default_rng(1).integers(3, 96, 40)]
ROOT = Path(__file__).resolve().parent.parent


def only(folder: Path, *names: str) -> list[str]:
    """What is in a folder beside `names`, hidden files included."""
    return sorted(path.name for path in folder.iterdir() if path.name not in names)


# Formats in.


def as_torch(folder: Path, shards: int = 1) -> None:
    """Turn a folder's model.safetensors into pytorch_model.bin."""
    tensors = {k: torch.tensor(v) for k, v in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    if shards == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return
    names, weight_map = sorted(tensors), {}
    for i in range(shards):
        file = f"pytorch_model-{i + 1:05}-of-{shards:05}.bin"
        torch.save({n: tensors[n] for n in names[i::shards]}, folder / file)
        weight_map |= {n: file for n in names[i::shards]}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


FORMATS = {
    "safetensors": lambda made: None,
    "sharded": lambda made: (
        (made.folder / "model.safetensors").unlink(),
        made.model.save_pretrained(made.folder, max_shard_size="60KB"),
    ),
    "torch": lambda made: as_torch(made.folder),
    "sharded torch": lambda made: as_torch(made.folder, 3),
}


@pytest.mark.parametrize("family", ["llama", "opt"])
@pytest.mark.parametrize("form", FORMATS)
def test_every_format_gives_the_same_weights(form, family, tiny, tmp_path):
    made = tiny(family)
    FORMATS[form](made)
    assert ("sharded" in form) == bool(list(made.folder.glob("*.index.json")))
    convert(made.folder, tmp_path / "out", skew="none")
    written = load_file(tmp_path / "out" / "model.safetensors")
    for name, parameter in made.model.named_parameters():
        np.testing.assert_array_equal(written[name], parameter.detach().numpy())


@pytest.mark.parametrize("prefix", ["", "decoder.", "model.decoder."])
def test_prefixes_and_harmless_tensors(prefix, tiny, tmp_path):
    made = tiny("opt")
    tensors = {k: torch.tensor(v) for k, v in load_file(made.folder / "model.safetensors").items()}
    renamed = {prefix + k.removeprefix("model.decoder."): v for k, v in tensors.items()}
    embeddings = tensors["model.decoder.embed_tokens.weight"]
    renamed |= {"lm_head.weight": embeddings, "decoder.version": torch.ones(1)}
    (made.folder / "model.safetensors").unlink()
    parameters = {k: torch.nn.Parameter(v) for k, v in renamed.items()}
    torch.save(collections.OrderedDict(parameters), made.folder / "pytorch_model.bin")
    convert(made.folder, tmp_path / "out", skew="none")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == tensors.keys()


def test_torch_views_and_half_precision(tiny, tmp_path):
    made = tiny("llama", num_hidden_layers=1)
    state = {k: v.to(torch.bfloat16) for k, v in made.model.state_dict().items()}
    name = "model.layers.0.mlp.up_proj.weight"
    state[name] = torch.cat([state[name], state[name]]).T.contiguous().T[56:]
    assert not state[name].is_contiguous() and state[name].storage_offset() > 0
    (made.folder / "model.safetensors").unlink()
    torch.save(state, made.folder / "pytorch_model.bin")
    convert(made.folder, tmp_path / "out", skew="none")
    tensors = open_tensors(tmp_path / "out")
    for key, value in state.items():
        read = np.asarray(tensors[key].read())
        assert read.dtype == jnp.bfloat16
        np.testing.assert_array_equal(read.astype(np.float32), value.float().numpy())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_mapping_is_its_own_inverse(family, tiny, tmp_path):
    made = tiny(family, tie_word_embeddings=False)
    convert(made.folder, tmp_path / "out", skew="none")
    model = checkpoint.load(tmp_path / "out", "float32")
    slots = expected(blueprint(model.config, jnp.float32))
    params = [model.params["embedding"], *model.params["layers"]]
    written = {}
    for group, tree in zip([slots.embedding, *slots.layers], params, strict=True):
        written |= dict(write_tree(group, tree))
    state = made.model.state_dict()
    assert written.keys() == state.keys()
    for name, tensor in written.items():
        np.testing.assert_array_equal(tensor, state[name].numpy())


# Conversions out.


@pytest.mark.parametrize("skew", ["svd", "balanced", "none"])
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_converted_folders_load_in_transformers(family, skew, tiny, tokens, tmp_path):
    from transformers import AutoModelForCausalLM

    made = tiny(family)
    out = convert(made.folder, tmp_path / "out", calibration=TEXT, skew=skew)
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
    made = tiny("opt")
    assert (
        main([*map(str, (made.folder, tmp_path / "out", "--skew", "none", "--dtype", dtype))]) == 0
    )
    tensors = open_tensors(tmp_path / "out")
    assert {tensor.dtype.name for tensor in tensors.values()} == {dtype}
    assert checkpoint.load(tmp_path / "out").dtype == jnp.float32  # the CPU's default
    model = checkpoint.load(tmp_path / "out", dtype)
    leaves = jax.tree.leaves(model.params)
    assert {leaf.dtype.name for leaf in leaves} == {dtype}
    difference = np.abs(logits_of(model, tokens) - made.logits(tokens)).max()
    assert difference <= {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.5}[dtype]


def test_manifest_records_everything_and_no_path(tiny_with_tokenizer, tmp_path):
    made = tiny_with_tokenizer("llama")
    config = json.loads((made.folder / "config.json").read_text())
    config["_name_or_path"] = str(made.folder)
    (made.folder / "config.json").write_text(json.dumps(config))
    out = convert(made.folder, tmp_path / "out")
    manifest = json.loads((out / "infinigen.json").read_text())
    assert manifest["format_version"] == 1 and manifest["calibration"]["tokens"] == 2048
    assert set(manifest["files"]) == {p.name for p in out.iterdir()} - {"infinigen.json"}
    assert set(manifest["sources"]) == {"config.json", "model.safetensors"}
    for file in out.glob("*.json"):
        assert str(tmp_path) not in file.read_text()
    model = checkpoint.load(out)
    assert model.tokenizer("Hello")["input_ids"] and model.tokenizer is model.tokenizer


def test_conversion_is_reproducible(tiny, tmp_path):
    made = tiny("llama", num_key_value_heads=2)
    first, second = (convert(made.folder, tmp_path / n, calibration=TEXT) for n in "ab")
    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes()


@pytest.mark.parametrize("name", checkpoint.EMBEDDED)
def test_embedded_models(name):
    folder = checkpoint.embedded(name)
    model = checkpoint.load(folder)
    assert model.skew == "svd" and model.config.head_dim == 32
    ids = np.asarray([model.tokenizer("It was a dark and stormy night.")["input_ids"]], np.int32)
    logits = logits_of(model, ids)
    loss = -np.mean(
        [jax.nn.log_softmax(logits[0, i])[ids[0, i + 1]] for i in range(ids.shape[1] - 1)]
    )
    assert loss < 5.5  # a guess among 1024 tokens costs 6.9
    text = "".join(f.read_text() for f in folder.glob("*.json"))
    assert not [word for word in ("/home", "/root", "/tmp", "/work") if word in text]
    with pytest.raises(InputError, match="no embedded model"):
        checkpoint.embedded("gpt")


@pytest.mark.parametrize("name", checkpoint.EMBEDDED)
def test_embedded_models_have_the_weights_of_their_sources(name, tokens):
    source = ROOT.parent / "shared" / "checkpoints" / name
    if not source.is_dir():
        pytest.skip(f"{source} is not on this machine")
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = reference(torch.tensor(tokens)).logits.numpy()
    ours = logits_of(checkpoint.load(checkpoint.embedded(name)), tokens)
    # bfloat16 weights: eight bits, errors of six layers added up.
    assert np.abs(ours - logits).mean() < 0.02 * np.abs(logits).mean()


# Damage in the source.


def edit_header(path: Path, edit) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    text = json.dumps(edit(header)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def moved(header: dict, by: int) -> dict:
    offsets = {n: h["data_offsets"] for n, h in header.items() if n != "__metadata__"}
    name = max(offsets, key=lambda name: offsets[name][0])
    begin, end = header[name]["data_offsets"]
    header[name]["data_offsets"] = [begin + by, end + by]
    return header


DAMAGE = {
    "truncated": (lambda p: p.write_bytes(p.read_bytes()[:-5]), "truncated"),
    "empty": (lambda p: p.write_bytes(b""), "truncated"),
    "longer": (lambda p: p.write_bytes(p.read_bytes() + b"x"), "after its last tensor"),
    "header cut": (lambda p: p.write_bytes(p.read_bytes()[:100]), "truncated"),
    "header too large": (lambda p: p.write_bytes(b"\xff" * 8 + b"{}"), "longer than the file"),
    "not json": (lambda p: p.write_bytes((9).to_bytes(8, "little") + b"{not json"), "not JSON"),
    "deep json": (lambda p: p.write_bytes((90000).to_bytes(8, "little") + b"[" * 90000), "JSON"),
    "overlap": (lambda p: edit_header(p, lambda h: moved(h, -4)), "overlaps"),
    "outside": (lambda p: edit_header(p, lambda h: moved(h, 10**9)), "hole"),
    "lfs pointer": (lambda p: p.write_bytes(b"version https://git-lfs.github.com"), "git lfs"),
    "zip": (lambda p: p.write_bytes(b"PK\x03\x04" + b"a" * 50), "zip"),
    "folder": (lambda p: (p.unlink(), p.mkdir()), "cannot be read"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_safetensors(kind, tiny, tmp_path):
    damage, message = DAMAGE[kind]
    made = tiny("llama", num_hidden_layers=1)
    damage(made.folder / "model.safetensors")
    with pytest.raises(InputError, match=message) as caught:
        convert(made.folder, tmp_path / "out", skew="none")
    assert str(made.folder / "model.safetensors") in str(caught.value)
    assert only(tmp_path) == ["llama"]


def test_safetensors_with_any_byte_of_the_header_changed(tmp_path):
    """Whatever a damaged header says, the answer is InputError or tensors inside the file."""
    from infinigen_jax.safetensors_io import SafetensorsFile

    path = tmp_path / "a.safetensors"
    layout = {"a": (np.dtype(np.float32), (2, 3)), "b": (np.dtype(np.int8), (4,))}
    with SafetensorsWriter(path, layout) as writer:
        writer.add("a", np.ones((2, 3), np.float32))
        writer.add("b", np.ones(4, np.int8))
        writer.close()
    whole = path.read_bytes()
    rng, refused = np.random.default_rng(0), 0
    for position in range(8 + int.from_bytes(whole[:8], "little")):
        damaged = bytearray(whole)
        damaged[position] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        try:
            file = SafetensorsFile(path)
            for name in file.tensors:
                assert file.read(name).nbytes <= len(whole)
        except InputError:
            refused += 1
    assert refused > 50


def test_index_problems(tiny, tmp_path):
    made = tiny("llama")
    FORMATS["sharded"](made)
    index = made.folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    shards = sorted(set(good["weight_map"].values()))
    assert len(shards) > 1

    def refused(message: str) -> None:
        with pytest.raises(InputError, match=message) as caught:
            convert(made.folder, tmp_path / "out", skew="none")
        assert str(made.folder) in str(caught.value)

    name = next(iter(good["weight_map"]))
    for value, message in (
        ({"weight_map": good["weight_map"] | {name: "../x"}}, "not a file name"),
        ({"weight_map": good["weight_map"] | {name: "absent.safetensors"}}, "absent.safetensors"),
        ({"weight_map": good["weight_map"] | {"extra": shards[0]}}, "extra is not in"),
        ({}, "weight_map"),
    ):
        index.write_text(json.dumps(value))
        refused(message)
    index.write_text("{")
    refused("not valid JSON")
    index.unlink()
    refused("index")
    index.write_text(json.dumps(good))
    (made.folder / shards[1]).unlink()
    refused(shards[1])
    shutil.copyfile(made.folder / shards[0], made.folder / shards[1])
    refused("is in")


def test_wrong_sources(tmp_path):
    def refused(source: Path, message: str) -> None:
        with pytest.raises(InputError, match=message) as caught:
            convert(source, tmp_path / "out")
        assert str(source) in str(caught.value)

    refused(tmp_path / "absent", "no such folder")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "give the folder")
    folder = tmp_path / "folder"
    folder.mkdir()
    refused(folder, "config.json: missing")
    (folder / "config.json").write_text("{")
    refused(folder, "not valid JSON")
    (folder / "config.json").write_text("[]")
    refused(folder, "not a JSON object")
    (folder / "config.json").write_text(json.dumps(LLAMA | {"rms_norm_eps": "tiny"}))
    refused(folder, "wrong kind")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    refused(folder, "no weights")
    (folder / "model.gguf").write_text("x")
    refused(folder, "model.gguf is of another kind")


LLAMA = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


def test_all_mismatches_are_in_one_error(tiny, tmp_path):
    made = tiny("llama", num_hidden_layers=1)
    tensors = {k: torch.tensor(v) for k, v in load_file(made.folder / "model.safetensors").items()}
    del tensors["model.layers.0.self_attn.q_proj.weight"], tensors["model.norm.weight"]
    tensors["model.layers.7.self_attn.q_proj.weight"] = torch.ones(2)
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.ones(3, 5)
    tensors["embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.ones(48, 56).to(torch.int8)
    (made.folder / "model.safetensors").unlink()
    torch.save(tensors, made.folder / "pytorch_model.bin")
    with pytest.raises(InputError) as caught:
        convert(made.folder, tmp_path / "out", skew="none")
    message = str(caught.value)
    for part in (
        "missing: ",
        "model.layers.0.self_attn.q_proj.weight (48, 48)",
        "model.norm.weight (48,)",
        "unexpected: model.layers.7.self_attn.q_proj.weight (2,)",
        "model.layers.0.mlp.up_proj.weight (3, 5) instead of (56, 48)",
        "doubled: model.embed_tokens.weight and embed_tokens.weight",
        "model.layers.0.mlp.down_proj.weight as int8",
    ):
        assert part in message
    assert "\n" not in message


def test_a_tied_head_must_equal_the_embeddings(tiny, tmp_path):
    made = tiny("opt", num_hidden_layers=1)
    tensors = {k: torch.tensor(v) for k, v in load_file(made.folder / "model.safetensors").items()}
    tensors["lm_head.weight"] = tensors["model.decoder.embed_tokens.weight"] + 1
    (made.folder / "model.safetensors").unlink()
    torch.save(tensors, made.folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="differs from the embeddings"):
        convert(made.folder, tmp_path / "out", skew="none")


def test_mapping_lists_only_the_first_of_many():
    config = config_from_hf(LLAMA | {"num_hidden_layers": 40})
    with pytest.raises(InputError, match="and 343 more"):
        match({}, blueprint(config, jnp.float32), "folder")


# Torch files.


class Malicious:
    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def test_a_malicious_pickle_is_refused_and_not_run(tiny, tmp_path):
    made = tiny("llama", num_hidden_layers=1)
    (made.folder / "model.safetensors").unlink()
    file, trap = made.folder / "pytorch_model.bin", tmp_path / "trap"
    torch.save({"model.norm.weight": Malicious(trap)}, file)
    with pytest.raises(InputError, match="mkdir") as caught:
        convert(made.folder, tmp_path / "out", skew="none")
    assert str(file) in str(caught.value) and not trap.exists()


def test_damaged_torch_files(tiny, tmp_path):
    made = tiny("llama", num_hidden_layers=1)
    as_torch(made.folder)
    file = made.folder / "pytorch_model.bin"
    whole = file.read_bytes()

    def refused(data: bytes, message: str) -> None:
        file.write_bytes(data)
        with pytest.raises(InputError, match=message) as caught:
            convert(made.folder, tmp_path / "out", skew="none")
        assert str(file) in str(caught.value)

    refused(whole[: len(whole) // 2], "truncated")
    refused(b"", "truncated")
    refused(b"\x80\x02" + b"x" * 99, "before 1.6")
    refused(b"version https://git-lfs.github.com", "git lfs")
    torch.save({"a": torch.ones(2), "step": 3}, file)
    refused(file.read_bytes(), "'step' is not a tensor")
    torch.save([torch.ones(2)], file)
    refused(file.read_bytes(), "no dictionary")
    torch.save({"a": torch.ones(2)}, file, _use_new_zipfile_serialization=False)
    refused(file.read_bytes(), "before 1.6")


def test_torch_files_with_any_byte_of_the_pickle_changed(tmp_path):
    from infinigen_jax.convert.torch_file import TorchFile

    path = tmp_path / "a.bin"
    torch.save({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}, path)
    whole = path.read_bytes()
    start = whole.index(b"\x80\x02")
    rng, refused = np.random.default_rng(0), 0
    for position in range(start, start + 400):
        damaged = bytearray(whole)
        damaged[position] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        try:
            file = TorchFile(path)
            for name in file.tensors:
                assert file.read(name).nbytes <= len(whole)
        except InputError:
            refused += 1
    assert refused > 50


# Damage in a converted folder.


def resign(folder: Path, name: str) -> None:
    """Record a changed file's hash, as if the converter had written it so."""
    from infinigen_jax.manifest import file_record

    manifest = json.loads((folder / "infinigen.json").read_text())
    manifest["files"][name] = file_record(folder / name)
    (folder / "infinigen.json").write_text(json.dumps(manifest))


def test_every_damaged_file_of_a_conversion_is_named(tiny, tmp_path):
    out = convert(tiny("llama").folder, tmp_path / "out", calibration=TEXT)
    for name in ("model.safetensors", "infinigen.safetensors", "config.json"):
        whole = (out / name).read_bytes()
        flipped = bytearray(whole)
        flipped[-3] ^= 1
        for data in (bytes(flipped), whole[:-1], None):
            if data is None:
                (out / name).unlink()
            else:
                (out / name).write_bytes(data)
            with pytest.raises(InputError, match="convert the model again") as caught:
                checkpoint.load(out)
            assert str(out / name) in str(caught.value)
        (out / name).write_bytes(whole)
    checkpoint.load(out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 2}, "format version 2"),
        ({"skew": "other"}, "'other' is unknown"),
        ({"files": {}}, "damaged"),
        ({"files": None}, "damaged"),
        ({"files": {"../x": {"sha256": "", "size": 1}}}, "missing"),
    ],
)
def test_damaged_manifest(change, message, tiny, tmp_path):
    out = convert(tiny("llama").folder, tmp_path / "out", calibration=TEXT)
    file = out / "infinigen.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(InputError, match=message):
        checkpoint.load(out)
    file.write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        checkpoint.load(out)


@pytest.mark.parametrize("skew", ["svd", "balanced"])
def test_damaged_bases(skew, tiny, tmp_path):
    out = convert(tiny("llama").folder, tmp_path / "out", calibration=TEXT, skew=skew)
    path = out / "infinigen.safetensors"
    whole = load_file(path)

    def refused(arrays: dict[str, np.ndarray], message: str) -> None:
        layout = {name: (array.dtype, array.shape) for name, array in arrays.items()}
        with SafetensorsWriter(path, layout) as writer:
            for name, array in arrays.items():
                writer.add(name, array)
            writer.close()
        resign(out, path.name)
        with pytest.raises(InputError, match=message) as caught:
            checkpoint.load(out)
        assert str(path) in str(caught.value)

    skewed = np.array(whole["query_basis"])
    skewed[1, 2, 0] *= 1.5
    refused(whole | {"query_basis": skewed}, "layer 1 is not")
    refused(whole | {"query_basis": np.full_like(skewed, np.nan)}, "layer 0 is not")
    refused({k: v for k, v in whole.items() if k != "key_basis"}, "key_basis is missing")
    refused(whole | {"key_mean": whole["key_mean"][:, :1]}, "key_mean is float32")


def test_a_conversion_without_tokenizer_says_so_when_asked(tiny, tmp_path):
    model = checkpoint.load(convert(tiny("opt").folder, tmp_path / "out", skew="none"))
    with pytest.raises(InputError, match="no tokenizer"):
        _ = model.tokenizer
    (tmp_path / "out" / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="cannot be read"):
        _ = model.tokenizer


def test_load_refuses_unknown_dtypes():
    for dtype in ("int8", "nonsense"):
        with pytest.raises(InputError, match=dtype):
            checkpoint.load(checkpoint.embedded(), dtype)


# Unconverted folders.


def test_unconverted_folders_go_through_the_cache(
    tiny_with_tokenizer, tokens, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = tiny_with_tokenizer("llama")
    said: list[str] = []
    model = checkpoint.load(made.folder, notify=said.append)
    assert len(said) == 1 and "not converted" in said[0] and model.skew == "svd"
    np.testing.assert_allclose(logits_of(model, tokens), made.logits(tokens), atol=1e-4)
    assert checkpoint.load(made.folder, notify=said.append).path == model.path
    assert len(said) == 1
    assert model.path is not None
    (model.path / "model.safetensors").write_bytes(b"damaged")
    again = checkpoint.load(made.folder, notify=said.append)
    assert again.path == model.path and "again" in said[1]
    os.utime(made.folder / "config.json", ns=(1, 1))
    assert checkpoint.load(made.folder, notify=said.append).path != model.path
    assert str(tmp_path / "cache") in str(model.path)


# The destination.


def test_destinations_that_are_refused(tiny, tmp_path):
    made = tiny("llama", num_hidden_layers=1)

    def refused(destination: Path, message: str, force: bool = False) -> None:
        with pytest.raises(InputError, match=message) as caught:
            convert(made.folder, destination, calibration=TEXT, force=force)
        assert str(destination) in str(caught.value)

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


def test_force_replaces_only_after_success(tiny, tmp_path, monkeypatch):
    made = tiny("llama", num_hidden_layers=1)
    out = convert(made.folder, tmp_path / "out", calibration=TEXT)
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    with pytest.raises(InputError, match="already exists"):
        convert(made.folder, out, skew="none")
    with monkeypatch.context() as patch:
        fail_after(patch, 5, OSError(28, "No space left on device"))
        with pytest.raises(InputError, match="disk is full"):
            convert(made.folder, out, skew="none", force=True)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    convert(made.folder, out, skew="none", force=True)
    assert checkpoint.load(out).skew == "none"
    assert only(tmp_path) == ["llama", "out"]


def fail_after(patch: pytest.MonkeyPatch, tensors: int, error: BaseException) -> None:
    add, count = SafetensorsWriter.add, iter(range(10**6))

    def failing(self, name, tensor):
        if next(count) == tensors:
            raise error
        add(self, name, tensor)

    patch.setattr(SafetensorsWriter, "add", failing)


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (OSError(28, "No space left on device"), InputError),
        (PermissionError(13, "Permission denied"), InputError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (RuntimeError("anything"), RuntimeError),
    ],
)
@pytest.mark.parametrize("tensors", [0, 7])
def test_a_failing_writer_leaves_nothing(error, seen, tensors, tiny, tmp_path, monkeypatch):
    made = tiny("llama", num_hidden_layers=1)
    fail_after(monkeypatch, tensors, error)
    with pytest.raises(seen):
        convert(made.folder, tmp_path / "new" / "deep" / "out", calibration=TEXT)
    assert only(tmp_path) == ["llama"]


def test_a_disk_that_is_too_small_is_noticed_beforehand(tiny, tmp_path, monkeypatch):
    made = tiny("llama")
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(InputError, match="only 0.00 GB are free"):
        convert(made.folder, tmp_path / "out", skew="none")


KILLED = """
import os, sys
from infinigen_jax.convert import convert
convert(sys.argv[1], sys.argv[2], skew="none",
        progress=lambda done, total: os.kill(os.getpid(), int(sys.argv[3])))
"""


def test_killed_conversions(tiny, tmp_path):
    """SIGTERM removes the temporary folder; after SIGKILL the next conversion does."""
    made = tiny("llama")
    out = tmp_path / "out"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    leftovers = {signal.SIGTERM: 0, signal.SIGKILL: 1}
    for number, expected_leftovers in leftovers.items():
        arguments = [sys.executable, "-c", KILLED, str(made.folder), str(out), str(int(number))]
        status = subprocess.run(arguments, env=environment, capture_output=True).returncode
        assert status == (143 if number == signal.SIGTERM else -signal.SIGKILL)
        assert not out.exists()
        assert len(only(tmp_path, "llama")) == expected_leftovers
    convert(made.folder, out, skew="none")
    assert only(tmp_path) == ["llama", "out"]


def test_the_lock_protects_a_running_conversion(tiny, tmp_path):
    made = tiny("llama", num_hidden_layers=1)
    seen: list[list[str]] = []

    def meanwhile(done: int, total: int) -> None:
        convert(made.folder, tmp_path / "out", skew="none", progress=None)
        seen.append(only(tmp_path, "llama", "out"))

    convert(made.folder, tmp_path / "out", skew="none", force=True, progress=meanwhile)
    assert len(seen) == 1 and len(seen[0]) == 1
    assert only(tmp_path) == ["llama", "out"]


# Memory.


def test_memory_is_that_of_a_layer_not_of_the_model(tmp_path):
    layers = 16
    hf = LLAMA | {
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_hidden_layers": layers,
        "tie_word_embeddings": True,
    }
    config = config_from_hf(hf)
    plan = blueprint(config, jnp.float32)
    params = random_params(config, jnp.float32)
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(hf))
    slots = expected(plan)
    layout = {slot.name: (np.dtype(np.float32), slot.shape) for slot in slots.flat()}
    with SafetensorsWriter(source / "model.safetensors", layout) as writer:
        trees = [params["embedding"], *params["layers"]]
        for group, tree in zip([slots.embedding, *slots.layers], trees, strict=True):
            for name, tensor in write_tree(group, tree):
                writer.add(name, np.asarray(tensor))
        writer.close()
    del params, tree, trees
    size = (source / "model.safetensors").stat().st_size
    on_device: list[int] = []

    def progress(done: int, total: int) -> None:
        on_device.append(sum(array.nbytes for array in jax.live_arrays()))

    convert(source, tmp_path / "warm", calibration=TEXT)  # compile and import first
    before = sum(array.nbytes for array in jax.live_arrays())
    tracemalloc.start()
    convert(source, tmp_path / "out", calibration=TEXT, progress=progress)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(on_device) == layers
    assert peak < 3 * size / layers
    assert max(on_device) - before < 3 * size / layers


# The command line.


def test_command_line_errors_are_one_line_and_status_two(tiny, tmp_path, capsys):
    made = tiny("llama", num_hidden_layers=1)
    capsys.readouterr()

    def fails(*arguments: str | Path) -> str:
        assert main([str(a) for a in arguments]) == 2
        captured = capsys.readouterr()
        lines = [line for line in captured.err.split("\n") if "error:" in line]
        assert captured.out == "" and len(lines) == 1 and "Traceback" not in captured.err
        return lines[0]

    assert "no such folder" in fails(tmp_path / "absent", tmp_path / "out")
    assert "no tokenizer" in fails(made.folder, tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(checkpoint.embedded() / name, made.folder / name)
    text = tmp_path / "text"
    assert "no such calibration text" in fails(made.folder, tmp_path / "o", "--calibration", text)
    text.write_bytes(b"\xff\xfe\xfa")
    assert "not UTF-8" in fails(made.folder, tmp_path / "out", "--calibration", text)
    text.write_text("short")
    assert "at least 12" in fails(made.folder, tmp_path / "out", "--calibration", text)
    text.write_text("a long enough text " * 20)  # but its tokens exceed the model's 96
    assert "vocabulary" in fails(made.folder, tmp_path / "out", "--calibration", text)
    with pytest.raises(SystemExit) as caught:
        main([str(made.folder), str(tmp_path / "out"), "--skew", "odd"])
    assert caught.value.code == 2
    capsys.readouterr()
    assert main([str(made.folder), str(tmp_path / "out"), "--skew", "none"]) == 0
    assert "wrote" in capsys.readouterr().err
    assert only(tmp_path) == ["llama", "out", "text"]
