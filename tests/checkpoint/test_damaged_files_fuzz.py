"""Damaged files: bytes flipped, cut out or put in give the same result or an InputError.

Where a format has no checksum, another result is accepted if it is one that the format allows.
"""

import functools
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_files
import jax
import numpy as np
import pytest
import torch
from fuzzing import Edit, altered, attempt, damage, damages, rounds
from hypothesis import given
from hypothesis import strategies as st
from runtime import engine
from tiny import LLAMA, TEXT, add_tokenizer, make_tiny, refuses

from infinigen_jax.checkpoint import source
from infinigen_jax.checkpoint.gguf_file import GgufFile
from infinigen_jax.checkpoint.manifest import MANIFEST_FILE, read_manifest
from infinigen_jax.checkpoint.torch_file import TorchFile
from infinigen_jax.convert.pipeline import convert
from infinigen_jax.engine.saved_file import SavedFile, write_saved
from infinigen_jax.evaluation.session import Measurement, Parts
from infinigen_jax.loading import load as checkpoint
from infinigen_jax.models import FAMILIES, ModelConfig
from infinigen_jax.text.detokenize import TextStream
from infinigen_jax.text.gguf_tokenizer import gguf_tokenizer
from infinigen_jax.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a source with a tokenizer, in all formats, and its conversion."""
    root = tmp_path_factory.mktemp("whole")
    made = make_tiny(root / "source", "llama", num_hidden_layers=1, vocab_size=1024)
    add_tokenizer(made.folder)
    convert(made.folder, root / "converted", calibration=TEXT)
    shutil.copytree(made.folder, root / "sharded")
    (root / "sharded" / "model.safetensors").unlink()
    made.model.save_pretrained(root / "sharded", max_shard_size="60KB")
    for name in ("torch", "gguf"):
        (root / name).mkdir()
    shutil.copyfile(root / "source/config.json", root / "torch/config.json")
    numbers = torch.arange(60.0).reshape(6, 10).T
    tensors = {"a": numbers, "b": torch.ones(7, dtype=torch.bfloat16)}
    torch.save(tensors, root / "torch/pytorch_model.bin")
    small = make_tiny(root / "hf", "llama", num_hidden_layers=1, **gguf_files.SMALL)
    tokenizer = gguf_files.sentencepiece()
    gguf_files.write_gguf(root / "gguf/model.gguf", small, gguf_files.Kind.Q8_0, **tokenizer)
    return root


def fresh(folders: Path, name: str) -> Path:
    """Return a copy to damage, always in one place, so that the last one can be inspected."""
    copy = folders.parent / "damaged"
    shutil.rmtree(copy, ignore_errors=True)
    return shutil.copytree(folders / name, copy)


@functools.cache
def loaded(folder: Path) -> Any:
    return checkpoint.load(folder, "float32")


def check_converted(folder: Path, whole: Path) -> None:
    """Checksums detect all changes except meaningless ones of the manifest."""
    model, expected = attempt(lambda: checkpoint.load(folder, "float32")), loaded(whole)
    if model is None:
        return
    for path in whole.iterdir():
        assert path.name == MANIFEST_FILE or (folder / path.name).read_bytes() == path.read_bytes()
    assert model.config == expected.config and model.skew == expected.skew
    values = ((each.params, each.bases, each.ahead) for each in (model, expected))
    jax.tree.map(np.testing.assert_array_equal, *values)


def check_manifest(folder: Path, whole: Path) -> None:
    manifest = attempt(lambda: read_manifest(folder))
    assert manifest is None or (manifest.skew in ("svd", "balanced", "none") and manifest.files)


def check_torch(folder: Path, whole: Path) -> None:
    """The archive has checksums: the data read equal the data written."""

    def read(folder: Path) -> dict[str, np.ndarray]:
        file = TorchFile(folder / "pytorch_model.bin")
        return {name: np.array(file.read(name)) for name in file.tensors}

    tensors = attempt(lambda: read(folder))
    if tensors is not None:
        jax.tree.map(np.testing.assert_array_equal, tensors, read(whole))


def check_config(config: ModelConfig) -> None:
    sizes = (config.hidden_size, config.num_layers, config.head_dim, config.vocab_size)
    assert all(type(size) is int and size > 0 for size in sizes)
    assert config.num_heads % config.num_kv_heads == 0
    ends = [config.bos_id, *config.eos_ids]
    assert all(type(token) is int and token < config.vocab_size for token in ends if token)


def check_settings(path: Path, whole: Path) -> None:
    if read := attempt(lambda: source.read_config(path)):
        check_config(read[1])


def check_tensors(path: Path, whole: Path) -> None:
    for tensor in (attempt(lambda: source.open_tensors(path)) or {}).values():
        assert tensor.file.parent == (path if path.is_dir() else path.parent)
        values = attempt(tensor.read)
        assert values is None or values.shape == tensor.shape


def check_tokenizer(tokenizer: Tokenizer) -> None:
    """Check that encoding and decoding give tokens and text, or one error."""
    for text in ("The king said", " <s>\n", "😀é", ""):
        tokens = attempt(lambda t=text: tokenizer.encode(t)) or ()
        assert all(type(token) is int for token in tokens)
    stream = TextStream(tokenizer)
    pieces = attempt(lambda: [stream.push([token]) for token in range(0, 1030, 40)])
    assert pieces is None or type("".join(pieces) + stream.rest()) is str


def check_tokens(folder: Path, whole: Path) -> None:
    if tokenizer := attempt(lambda: load_tokenizer(folder)):
        check_tokenizer(tokenizer)


def check_gguf(folder: Path, whole: Path) -> None:
    """A header without checksum: a model that the format allows, or one line."""
    path = folder / "model.gguf"
    check_settings(path, whole)
    check_tensors(path, whole)
    if tokenizer := attempt(lambda: gguf_tokenizer(GgufFile(path))):
        check_tokenizer(tokenizer)


# The folder of each kind, the files to damage, and the check.
KINDS: dict[str, tuple[str, str, Callable[[Path, Path], None]]] = {
    "conversion": ("converted", "*", check_converted),
    "manifest": ("converted", MANIFEST_FILE, check_manifest),
    "config": ("source", "[cg]*.json", check_settings),
    "safetensors": ("source", "model.safetensors", check_tensors),
    "shards": ("sharded", "model*", check_tensors),
    "torch": ("torch", "*.bin", check_torch),
    "tokenizer": ("source", "tokenizer*", check_tokens),
    "gguf": ("gguf", "*", check_gguf),
}


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), changes=damages)
def test_damaged_files(folders, kind, data, changes):
    name, pattern, check = KINDS[kind]
    folder = fresh(folders, name)
    damage(data.draw(st.sampled_from(sorted(folder.glob(pattern)))), changes)
    check(folder, folders / name)


def test_torch_data_has_a_checksum(folders):
    path = fresh(folders, "torch") / "pytorch_model.bin"
    whole = path.read_bytes()
    at = whole.index(np.arange(60, dtype=np.float32).tobytes())
    path.write_bytes(Edit((at + 8.5) / len(whole), 1, b"\x7f").apply(whole))
    file = TorchFile(path)
    file.read("b")
    refuses("a is damaged", file.read, "a")


def altered_files(draw: random.Random, folder: Path, files: dict[str, Any], most: int) -> None:
    """Write JSON files with some alterations."""
    changed = dict(files)
    for _ in range(draw.randint(1, most)):
        name = draw.choice([next(iter(files)), *files])
        changed[name] = altered(draw, changed[name])
    for name, value in changed.items():
        (folder / name).write_text(json.dumps(value))


@pytest.mark.slow
def test_altered_tokenizers(tmp_path, capfd):
    names = ("tokenizer.json", "tokenizer_config.json")
    whole = {name: json.loads((checkpoint.embedded() / name).read_text()) for name in names}
    for draw in rounds(capfd, "tokenizers"):
        altered_files(draw, tmp_path, whole, 3)
        check_tokens(tmp_path, tmp_path)


OTHERS = {"ffn_dim": 8, "num_key_value_heads": 1, "head_dim": 4, "hidden_act": "silu"}
OTHERS |= {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}}
OTHERS |= {"layer_types": ["full_attention"], "sliding_window": None}
OTHERS |= {"eos_token_id": [2], "rms_norm_eps": 1e-5}


@pytest.mark.slow
def test_altered_configurations(tmp_path, capfd):
    for draw in rounds(capfd, "configurations"):
        files = {
            "config.json": LLAMA | OTHERS | {"model_type": draw.choice(FAMILIES)},
            "generation_config.json": {"eos_token_id": [2, 3], "bos_token_id": 1},
        }
        altered_files(draw, tmp_path, files, 4)
        check_settings(tmp_path, tmp_path)


@given(changes=damages)
def test_saved_measurements(tmp_path_factory, changes):
    """A damaged part, or one of another key, is measured again."""
    folder = tmp_path_factory.mktemp("parts")
    parts = Parts(folder / "result.json", {"text": "a"})
    arrays = {"scores": np.arange(50.0), "positions": np.arange(50)}
    parts.save({"budget": 0.1}, Measurement(arrays, {"seconds": 1.5}))
    whole = parts.load({"budget": 0.1})
    assert whole is not None and whole.values == {"seconds": 1.5}
    other = Parts(folder / "result.json", {"text": "b"})
    assert other.load({"budget": 0.1}) is parts.load({"budget": 0.2}) is None
    (path,) = (folder / "result.json.parts").iterdir()
    damage(path, changes)
    found = parts.load({"budget": 0.1})
    if found is not None:
        assert found.values == {"seconds": 1.5} and found.arrays.keys() == arrays.keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(found.arrays[name], array)


@pytest.fixture(scope="module")
def conversation(tmp_path_factory) -> Path:
    talk = engine("one").conversation(context=200)
    list(talk.turn([5, 6, 7], 5))
    talk.save(path := tmp_path_factory.mktemp("talk") / "whole")
    return path


@given(changes=damages)
def test_saved_conversations(conversation, changes):
    """The checksum finds everything."""
    path = conversation.with_name("damaged")
    shutil.copyfile(conversation, path)
    changed = damage(path, changes)
    file = attempt(lambda: SavedFile(path))
    assert changed == (file is None)


@given(data=st.data())
def test_saved_conversations_with_another_content(conversation, data):
    """The checksum fits; records and arrays of another kind are refused all the same."""
    whole = SavedFile(conversation)
    record = whole.record
    arrays = {n: whole.read(n, *info[:2]) for n, info in whole._file.tensors.items()}
    del arrays["record"], arrays["checksum"]
    if data.draw(st.booleans()):
        record = altered(data.draw(st.randoms()), record)
    else:
        name = data.draw(st.sampled_from(sorted(arrays)))
        less = arrays[name][..., :-1] if arrays[name].ndim else arrays[name]
        others = {"less": less, "kind": arrays[name].astype(np.int8), "none": None}
        other = others[data.draw(st.sampled_from(sorted(others)))]
        arrays = {n: other if n == name else x for n, x in arrays.items()}
        arrays = {n: x for n, x in arrays.items() if x is not None}
    path = conversation.with_name("changed")
    layout = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    write_saved(path, record, layout, arrays.items())
    resumed = attempt(lambda: engine("one").resume(path))
    if resumed is not None:
        assert resumed.cached in (len(resumed.tokens), len(resumed.tokens) - 1)
        assert len(arrays) == len(whole._file.tensors) - 2
