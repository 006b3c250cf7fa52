"""Reading checkpoints: every format, and a clear refusal of every kind of damage."""

import collections
import functools
import json
import os
import shutil
import types
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tiny import LLAMA, as_torch, only, refuses, take_tensors

from infinigen_jax.checkpoint.hf_folder import (
    checked_folder,
    open_tensors,
    read_config,
    side_files,
    weight_files,
)
from infinigen_jax.checkpoint.tensor_names import TensorSpec, expected, match, read_tree
from infinigen_jax.checkpoint.tensor_source import TensorSource
from infinigen_jax.checkpoint.torch_file import Refused, read_pickle
from infinigen_jax.convert.pipeline import convert
from infinigen_jax.errors import UnsupportedModelError
from infinigen_jax.models import blueprint, config_from_hf

# Input formats.


FORMATS = {
    "safetensors": lambda made: None,
    "sharded": lambda made: (
        (made.folder / "model.safetensors").unlink(),
        made.model.save_pretrained(made.folder, max_shard_size="60KB"),
    ),
    "torch": lambda made: as_torch(made.folder),
    "sharded torch": lambda made: as_torch(made.folder, 3),
}


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_gives_the_same_weights(form, tiny, tmp_path):
    made = tiny("llama")
    FORMATS[form](made)
    assert ("sharded" in form) == bool(list(made.folder.glob("*.index.json")))
    convert(made.folder, tmp_path / "out", skew="none")
    written = open_tensors(tmp_path / "out")  # in as many shards as the source
    for name, parameter in made.model.named_parameters():
        np.testing.assert_array_equal(written[name].read(), parameter.detach().numpy())


@pytest.mark.parametrize("prefix", ["", "decoder.", "model.decoder."])
def test_prefixes_and_harmless_tensors(prefix, tiny, tmp_path):
    made = tiny("opt")
    tensors = take_tensors(made.folder)
    renamed = {prefix + k.removeprefix("model.decoder."): v for k, v in tensors.items()}
    embeddings = tensors["model.decoder.embed_tokens.weight"]
    renamed |= {"lm_head.weight": embeddings, "decoder.version": torch.ones(1)}
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


def refused(source: Path, message: str, named: Path | None = None) -> None:
    """Check that a conversion ends with an error that names the file, and leaves nothing."""
    out = source.parent / "out"
    assert str(named or source) in refuses(message, convert, source, out, skew="none")
    assert not out.exists()


SAFE, TORCH = "model.safetensors", "pytorch_model.bin"
POINTER = b"version https://git-lfs.github.com"
OLD = {"_use_new_zipfile_serialization": False}
DAMAGE = [
    (SAFE, lambda p: p.write_bytes(p.read_bytes()[:-5]), "truncated"),
    (SAFE, lambda p: p.write_bytes(p.read_bytes() + b"x"), "not fully covered"),
    (SAFE, lambda p: p.write_bytes((90000).to_bytes(8, "little") + b"[" * 90000), "JSON"),
    (SAFE, lambda p: p.write_bytes(POINTER), "git lfs"),
    (SAFE, lambda p: p.write_bytes(b"PK\x03\x04" + b"a" * 50), "zip"),
    (SAFE, lambda p: (p.unlink(), p.mkdir()), "cannot be read"),
    (TORCH, lambda p: p.write_bytes(p.read_bytes()[: p.stat().st_size // 2]), "truncated"),
    (TORCH, lambda p: p.write_bytes(POINTER), "git lfs"),
    (TORCH, lambda p: torch.save({"a": torch.ones(2), "step": 3}, p), "'step' is not a tensor"),
    (TORCH, lambda p: torch.save([torch.ones(2)], p), "no dictionary"),
    (TORCH, lambda p: torch.save({"a": torch.ones(2)}, p, **OLD), "before 1.6"),
]


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGE)
def test_damaged_files(name, damage, message, tiny, tmp_path):
    made = tiny("llama", num_hidden_layers=1)
    if name == TORCH:
        as_torch(made.folder)
    damage(made.folder / name)
    refused(made.folder, message, made.folder / name)
    assert only(tmp_path) == ["llama"]


def test_index_problems(tiny):
    made = tiny("llama")
    FORMATS["sharded"](made)
    folder = made.folder
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    shards = sorted(set(places.values()))
    assert len(shards) > 1
    name = next(iter(places))
    for value, message in (
        ({"weight_map": places | {name: "../x"}}, "not a file name"),
        ({"weight_map": places | {name: "absent.safetensors"}}, "absent.safetensors"),
        ({}, "weight_map"),
    ):
        index.write_text(json.dumps(value))
        refused(folder, message)
    # Two files have a tensor that the index does not name.
    first, second = (folder / shard for shard in shards[:2])
    whole, both = second.read_bytes(), load_file(second)
    twice = next(iter(load_file(first).items()))
    save_file(both | dict([twice]), second)
    others = {n: x for n, x in places.items() if n != twice[0]}
    index.write_text(json.dumps({"weight_map": others}))
    refused(folder, "two files have")
    second.write_bytes(whole)
    index.write_text("{")
    refused(folder, "not valid JSON")
    index.unlink()
    refused(folder, "index")
    index.write_text(json.dumps({"weight_map": places}))
    second.unlink()
    refused(folder, shards[1])
    shutil.copyfile(first, second)
    refused(folder, "two files have")


def test_one_file_goes_before_an_index(tiny):
    """Merged weights may be saved into a folder of shards. Transformers also reads them."""
    made = tiny("llama")
    (made.folder / "model.safetensors.index.json").write_text("{}")
    assert weight_files(made.folder) == [made.folder / "model.safetensors"]


def test_a_folder_of_licences_is_no_side_file(tiny):
    made = tiny("llama")
    (made.folder / "LICENSES").mkdir()
    (made.folder / "LICENSE").write_text("Apache-2.0")
    assert checked_folder(made.folder) == made.folder
    assert made.folder / "LICENSE" in side_files(made.folder)
    assert made.folder / "LICENSES" not in side_files(made.folder)


def test_wrong_sources(tmp_path):
    refused(tmp_path / "absent", "no such folder")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "give a .gguf file or the folder")
    folder = tmp_path / "folder"
    folder.mkdir()
    refused(folder, "config.json: missing; .* give such a folder")
    (folder / "config.json").symlink_to("missing")
    refused(folder, "config.json: no such file")
    (folder / "config.json").unlink()
    for text, message in (
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        (json.dumps(LLAMA | {"rms_norm_eps": "tiny"}), "wrong type"),
        (json.dumps(LLAMA), "no weights"),
    ):
        (folder / "config.json").write_text(text)
        refused(folder, message)
    (folder / "model.safetensors").symlink_to("missing")
    refused(folder, "model.safetensors: no such file")
    (folder / "model.safetensors").unlink()
    (folder / "model.h5").write_text("x")
    refused(folder, "model.h5 has another format")
    (folder / "model.gguf").write_text("x")
    refused(folder, "to use model.gguf, give the path of that file")


def test_all_mismatches_are_in_one_error(tiny, tmp_path):
    made = tiny("llama", num_hidden_layers=1)
    tensors = take_tensors(made.folder)
    del tensors["model.layers.0.self_attn.q_proj.weight"], tensors["model.norm.weight"]
    tensors["model.layers.7.self_attn.q_proj.weight"] = torch.ones(2)
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.ones(3, 5)
    tensors["embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.ones(48, 56).to(torch.int8)
    torch.save(tensors, made.folder / "pytorch_model.bin")
    message = refuses("missing: ", convert, made.folder, tmp_path / "out", skew="none")
    for part in (
        "model.layers.0.self_attn.q_proj.weight (48, 48)",
        "model.norm.weight (48,)",
        "unexpected: model.layers.7.self_attn.q_proj.weight (2,)",
        "model.layers.0.mlp.up_proj.weight (3, 5) instead of (56, 48)",
        "doubled: model.embed_tokens.weight and embed_tokens.weight",
        "model.layers.0.mlp.down_proj.weight as int8",
    ):
        assert part in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", "model.embed_tokens.weight"), ("exaone", "transformer.wte.weight")],
)
def test_a_tied_head_must_equal_the_embeddings(family, name):
    config = LLAMA | {"model_type": family, "num_key_value_heads": 2, "tie_word_embeddings": True}
    shapes = blueprint(config_from_hf(config), jnp.float32)
    tensors = {}
    for spec in expected(shapes).flat():
        given = name if "embed_tokens" in spec.name else spec.name
        read = functools.partial(np.ones, spec.shape, np.float32)
        tensors[given] = TensorSource(given, Path(), spec.shape, np.dtype(np.float32), read)
    head = tensors[name]
    assert len(match(tensors | {"lm_head.weight": head}, shapes, "folder")) == len(tensors)
    other = head._replace(read=lambda: np.zeros(head.shape, np.float32))
    both = tensors | {"lm_head.weight": other}
    refuses("differs from the embeddings", match, both, shapes, "folder")


def test_mapping_lists_only_the_first_of_many():
    config = config_from_hf(LLAMA | {"num_hidden_layers": 40})
    refuses("and 343 more", match, {}, blueprint(config, jnp.float32), "folder")


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
    refused(made.folder, "mkdir", file)
    assert not trap.exists()


def test_a_pickle_changes_no_types():
    """The state of NumPy's dtypes that others define could be set."""
    state = b"(K\x03X\x01\0\0\0>NNNKcK\x04K\0tb."
    with pytest.raises(AttributeError):
        read_pickle(b"\x80\x02ctorch\nBFloat16Storage\n" + state)
    assert jnp.dtype(jnp.bfloat16).itemsize == 2


@pytest.mark.parametrize("made", [b"(d.", b"\x8f(\x90.", b"(\x91.", b"\x96" + bytes(7) + b"\xff"])
def test_a_pickle_has_no_sets_arrays_or_dictionaries_in_one_step(made):
    """Items would be hashed, which can take forever; an array of bytes takes what it claims."""
    with pytest.raises(Refused, match="has a set"):
        read_pickle(b"\x80\x05" + made)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_parameters_are_not_the_files_memory(dtype):
    """JAX would alias an aligned array of the right dtype."""
    stored = np.zeros(64 + 16, dtype)
    stored = stored[-stored.ctypes.data % 64 // stored.itemsize :][:64].reshape(8, 8)
    source: Any = types.SimpleNamespace(read=lambda: stored)
    specs = [TensorSpec("a", (8, 8), ("up", "weight"))]
    weight = read_tree(specs, {"a": source}, jnp.float32)["up"]["weight"]
    stored[:] = 1
    assert weight.dtype == jnp.float32 and not weight.any()


@pytest.mark.parametrize("family", ["llama", "mistral", "ministral", "qwen2", "qwen3", "opt"])
@pytest.mark.parametrize("name", ["num_hidden_layers", "vocab_size"])
def test_sizes_that_no_model_has(family, name):
    """Refused before a list of all layers exhausts the memory."""
    for size in (1 << 31, 10**12):
        with pytest.raises(UnsupportedModelError, match=f"config.json: {name} is {size}"):
            others = {"model_type": family, "ffn_dim": 64, "num_key_value_heads": 2}
            config_from_hf(LLAMA | others | {name: size})


@pytest.mark.parametrize("name", ["bos_token_id", "eos_token_id"])
@pytest.mark.parametrize("value", [[[1]], {}, "2", True, 1.5, -2, 96, [2, "3"], 10**30])
def test_numbers_of_special_tokens(name, value, tmp_path):
    """In one line that names the file and the setting, also from generation_config.json."""
    files = {"config.json": LLAMA, "generation_config.json": {}}
    for file in files if name == "eos_token_id" else ["config.json"]:
        for other, settings in files.items():
            changed = settings | {name: value} if other == file else settings
            (tmp_path / other).write_text(json.dumps(changed))
        refuses(f"{tmp_path}/{file}: {name} is .* below 96", read_config, tmp_path)


def test_several_tokens_may_end_a_text(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"pad_token_id": 96}))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 95]}')
    assert read_config(tmp_path)[1].eos_ids == (2, 95)
