"""Damaged files: bytes flipped, cut out or put in give the same result or an InputError.

Where a format has no checksum, another result is accepted if it is one that the format allows.
"""

import functools
import json
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import gguf_files
import jax
import numpy as np
import pytest
import torch
from fuzzing import Edit, altered, attempt, damage, damages, hostile_template, rounds
from gguf_files import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import LLAMA, TEXT, add_tokenizer, make_tiny

from infinigen_jax.checkpoint import source
from infinigen_jax.checkpoint.gguf_file import GgufFile
from infinigen_jax.checkpoint.hf_folder import open_tensors, read_config
from infinigen_jax.checkpoint.manifest import MANIFEST_FILE, read_manifest
from infinigen_jax.checkpoint.safetensors import SafetensorsFile
from infinigen_jax.checkpoint.torch_file import TorchFile
from infinigen_jax.convert import convert
from infinigen_jax.errors import InputError
from infinigen_jax.loading import load as checkpoint
from infinigen_jax.models import FAMILIES, ModelConfig
from infinigen_jax.text.detokenize import TextStream
from infinigen_jax.text.gguf_tokenizer import gguf_tokenizer
from infinigen_jax.text.templates import render_chat
from infinigen_jax.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """A source, with a tokenizer, in both formats; its conversion."""
    root = tmp_path_factory.mktemp("whole")
    made = make_tiny(root / "source", "llama", num_hidden_layers=1, vocab_size=1024)
    add_tokenizer(made.folder)
    convert(made.folder, root / "converted", calibration=TEXT)
    shutil.copytree(made.folder, root / "sharded")
    (root / "sharded" / "model.safetensors").unlink()
    made.model.save_pretrained(root / "sharded", max_shard_size="60KB")
    torch.save(
        {"a": torch.arange(60.0).reshape(6, 10).T, "b": torch.ones(7, dtype=torch.bfloat16)},
        root / "torch.bin",
    )
    return root


def fresh(folders: Path, name: str, *files: str) -> Path:
    """A copy to damage, of some files or all; one place, so that the last one can be looked at."""
    copy = folders.parent / "damaged"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    for path in (folders / name).iterdir():
        if not files or path.name in files:
            shutil.copyfile(path, copy / path.name)
    return copy


def same(a: Any, b: Any) -> bool:
    leaves, tree = jax.tree.flatten(a)
    others, other_tree = jax.tree.flatten(b)
    return tree == other_tree and all(map(np.array_equal, leaves, others))


@settings(max_examples=20)
@given(data=st.data(), changes=damages)
def test_converted_folders(folders, data, changes):
    """Checksums find everything but changes that mean nothing."""
    whole = checkpoint.load(folders / "converted", "float32")
    folder = fresh(folders, "converted")
    name = data.draw(st.sampled_from(sorted(path.name for path in folder.iterdir())))
    changed = damage(folder / name, changes)
    model = attempt(lambda: checkpoint.load(folder, "float32"))
    if model is None:
        assert changed
        return
    assert name == MANIFEST_FILE or not changed
    assert model.config == whole.config and model.skew == whole.skew
    assert same((model.params, model.bases), (whole.params, whole.bases))
    assert same(model.ahead, whole.ahead)


@given(changes=damages)
def test_manifest(folders, changes):
    folder = fresh(folders, "converted", MANIFEST_FILE)
    damage(folder / MANIFEST_FILE, changes)
    manifest = attempt(lambda: read_manifest(folder))
    assert manifest is None or (manifest.skew in ("svd", "balanced", "none") and manifest.files)


@given(name=st.sampled_from(["config.json", "generation_config.json"]), changes=damages)
def test_config(folders, name, changes):
    folder = fresh(folders, "source", "config.json", "generation_config.json")
    damage(folder / name, changes)
    read = attempt(lambda: read_config(folder))
    if read is not None:
        check_config(read[1])


def check_config(config: ModelConfig) -> None:
    sizes = (config.hidden_size, config.num_layers, config.head_dim, config.vocab_size)
    assert all(type(size) is int and size > 0 for size in sizes)
    assert config.num_heads % config.num_kv_heads == 0
    ends = [config.bos_id, config.pad_id, *config.eos_ids]
    assert all(type(token) is int and token < config.vocab_size for token in ends if token)


@given(changes=damages)
def test_safetensors(folders, changes):
    path = fresh(folders, "source", "model.safetensors") / "model.safetensors"
    damage(path, changes)
    file = attempt(lambda: SafetensorsFile(path))
    for name in file.tensors if file else ():
        tensor = file.read(name)
        assert tensor.shape == file.tensors[name].shape and tensor.nbytes <= path.stat().st_size


@given(data=st.data(), changes=damages)
def test_shards(folders, data, changes):
    folder = fresh(folders, "sharded")
    names = sorted(path.name for path in folder.glob("model*"))
    damage(folder / data.draw(st.sampled_from(names)), changes)
    tensors = attempt(lambda: open_tensors(folder))
    for tensor in (tensors or {}).values():
        assert tensor.read().shape == tensor.shape and tensor.file.parent == folder


def test_torch_data_has_a_checksum(folders):
    whole = (folders / "torch.bin").read_bytes()
    at = whole.index(np.arange(60, dtype=np.float32).tobytes())
    path = folders.parent / "damaged.bin"
    path.write_bytes(Edit((at + 8.5) / len(whole), 1, b"\x7f").apply(whole))
    file = TorchFile(path)
    file.read("b")
    with pytest.raises(InputError, match="a is damaged"):
        file.read("a")


@given(changes=damages)
def test_torch_file(folders, changes):
    """Its archive has checksums: what is read is what was written."""
    whole = TorchFile(folders / "torch.bin")
    path = folders.parent / "damaged.bin"
    shutil.copyfile(folders / "torch.bin", path)
    damage(path, changes)

    def read() -> dict[str, np.ndarray]:
        file = TorchFile(path)
        return {name: np.array(file.read(name)) for name in file.tensors}

    tensors = attempt(read)
    if tensors is not None:
        assert tensors.keys() == whole.tensors.keys()
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(tensor, whole.read(name))


@given(name=st.sampled_from(["tokenizer.json", "tokenizer_config.json"]), changes=damages)
def test_tokenizer(folders, name, changes):
    folder = fresh(folders, "source", "config.json", "tokenizer.json", "tokenizer_config.json")
    damage(folder / name, changes)
    tokenizer = attempt(lambda: load_tokenizer(folder))
    if tokenizer is not None:
        check_tokenizer(tokenizer)


def check_tokenizer(tokenizer: Tokenizer) -> None:
    """Check that encoding and decoding give tokens and text, or one error."""
    for text in ("The king said", " <s>\n", "😀é", ""):
        assert all(
            type(token) is int for token in attempt(lambda t=text: tokenizer.encode(t)) or ()
        )
    stream = TextStream(tokenizer)
    pieces = attempt(lambda: [stream.push([token]) for token in range(0, 1030, 40)])
    assert pieces is None or type("".join(pieces) + stream.finish()) is str


# Longer runs: -m slow, with FUZZ_SECONDS and FUZZ_SEED, see `fuzzing`.


@pytest.mark.slow
def test_altered_tokenizers(tmp_path, capfd):
    names = ("tokenizer.json", "tokenizer_config.json")
    whole = {name: json.loads((checkpoint.embedded() / name).read_text()) for name in names}
    for draw in rounds(capfd, "tokenizers"):
        files = dict(whole)
        for _ in range(draw.randint(1, 3)):
            name = draw.choice([names[0], *names])
            files[name] = altered(draw, files[name])
        for name, value in files.items():
            (tmp_path / name).write_text(json.dumps(value))
        if tokenizer := attempt(lambda: load_tokenizer(tmp_path)):
            check_tokenizer(tokenizer)


OTHERS = {
    "ffn_dim": 8,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0},
    "layer_types": ["full_attention"],
    "sliding_window": None,
    "eos_token_id": [2],
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


@pytest.mark.slow
def test_altered_configurations(tmp_path, capfd):
    for draw in rounds(capfd, "configurations"):
        files = {
            "config.json": LLAMA | OTHERS | {"model_type": draw.choice(FAMILIES)},
            "generation_config.json": {"eos_token_id": [2, 3], "bos_token_id": 1},
        }
        for _ in range(draw.randint(1, 4)):
            name = draw.choice(sorted(files))
            files[name] = altered(draw, files[name])
        for name, value in files.items():
            (tmp_path / name).write_text(json.dumps(value))
        if read := attempt(lambda: read_config(tmp_path)):
            check_config(read[1])


@pytest.mark.slow
def test_hostile_templates(capfd):
    for draw in rounds(capfd, "templates"):
        template = hostile_template(draw)
        begun = time.monotonic()
        text = attempt(
            lambda t=template: render_chat(t, [{"role": "user", "content": "a"}], {}, seconds=0.2)
        )
        assert (text is None or type(text) is str) and time.monotonic() - begun < 5


PARTS = (
    b'"',
    b"{",
    b"[" * 99,
    b"-1",
    b"1e999",
    b"9" * 30,
    b"\0",
    b"null",
    b"\x8ar",
    b"..",
    b"\xff",
)


def strange(path: Path, rng: random.Random) -> None:
    """Damage a file, or put something else in its place."""
    data = path.read_bytes()
    for _ in range(rng.choice((1, 1, 2, 3))):
        place, cut = rng.choice((0.0, 0.05, 1.0)) * rng.random(), rng.choice((0, 1, 4, 20, 1 << 40))
        data = Edit(place, cut, rng.choice((b"", rng.randbytes(3), *PARTS))).apply(data)
    path.unlink()
    makers = {1: os.mkfifo, 2: os.mkdir, 3: lambda p: p.symlink_to("/dev/zero")}
    makers.get(rng.randrange(40), lambda p: p.write_bytes(data))(path)


@pytest.mark.slow
def test_any_damage(folders, capfd):
    """All files of model folders."""

    def read(folder: Path) -> None:
        source.checked_source(folder)
        read_config(folder)
        for tensor in open_tensors(folder).values():
            tensor.read()

    (folders / "torch").mkdir()
    shutil.copyfile(folders / "torch.bin", folders / "torch/pytorch_model.bin")
    shutil.copyfile(folders / "source/config.json", folders / "torch/config.json")
    for draw in rounds(capfd, "model folders"):
        kind = draw.choice(("source", "sharded", "torch", "torch", "torch", "converted"))
        folder = fresh(folders, kind)
        strange(draw.choice(sorted(folder.iterdir())), draw)
        reader = checkpoint.load if kind == "converted" else read
        attempt(functools.partial(reader, folder))


@given(changes=damages)
def test_gguf(gguf_whole, changes):
    """A header without checksum: a model that the format allows, or one line."""
    path = gguf_whole.with_name("damaged.gguf")
    shutil.copyfile(gguf_whole, path)
    damage(path, changes)
    if read := attempt(lambda: source.read_config(path)):
        check_config(read[1])
    for tensor in (attempt(lambda: source.open_tensors(path)) or {}).values():
        values = attempt(tensor.read)
        assert values is None or values.shape == tensor.shape
    if tokenizer := attempt(lambda: gguf_tokenizer(GgufFile(path))):
        check_tokenizer(tokenizer)


@pytest.fixture(scope="module")
def gguf_whole(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("gguf")
    made = make_tiny(root / "hf", "llama", num_hidden_layers=1, **gguf_files.SMALL)
    return gguf_files.write_gguf(root / "whole.gguf", made, gguf_files.Kind.Q8_0, **sentencepiece())
