"""Deceptive files of a model folder: pipes, links, and claims of huge sizes."""

import json
import os
import shutil
import zipfile
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from tiny import only, python, refuses

from infinigen_jax.checkpoint.hf_folder import read_config
from infinigen_jax.checkpoint.safetensors import SafetensorsFile
from infinigen_jax.checkpoint.torch_file import TorchFile
from infinigen_jax.convert.pipeline import convert
from infinigen_jax.files.regular import LARGEST_JSON
from infinigen_jax.loading import load as checkpoint


def source(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for file in checkpoint.embedded("tiny-llama").iterdir():
        if not file.name.startswith("infinigen"):
            shutil.copyfile(file, folder / file.name)
    return folder


READ = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "LICENSE")


@pytest.mark.parametrize("name", READ)
def test_pipes_devices_and_folders_are_refused_without_opening(name, tmp_path):
    """None is waited for; a device might never end."""
    folder = source(tmp_path / "source")
    for make in (os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)):
        if name == "LICENSE" and make is os.mkdir:
            continue  # may be a folder of licences
        path = folder / name
        path.unlink(missing_ok=True)
        make(path)
        said = refuses("not a regular file", convert, folder, tmp_path / "out", skew="none")
        assert str(path) in said
        path.rmdir() if path.is_dir() else path.unlink()
    assert only(tmp_path) == ["source"]


def test_a_huge_file_is_refused_unread(tmp_path):
    folder = source(tmp_path / "source")
    os.truncate(folder / "config.json", LARGEST_JSON + 1)
    refuses("config.json: too large", read_config, folder)


def test_links_and_rights(tmp_path):
    """Hugging Face's cache consists of links. A copy is as private as its original."""
    blobs = source(tmp_path / "blobs")
    os.chmod(blobs / "tokenizer.json", 0o600)
    (blobs / "evil").write_text("import os")
    folder = tmp_path / "snapshots" / "main"
    folder.mkdir(parents=True)
    for blob in blobs.iterdir():
        (folder / blob.name).symlink_to(blob)
    others = {"tokenizer_evil.py", "chat_template.py", "id_rsa", "README.md"}  # not copied
    for name in others:
        (folder / name).symlink_to(blobs / "evil")
    convert(folder, tmp_path / "out", skew="none")
    assert not [file for file in (tmp_path / "out").iterdir() if file.is_symlink()]
    modes = {file.name: file.stat().st_mode & 0o077 for file in (tmp_path / "out").iterdir()}
    assert [name for name, mode in modes.items() if not mode] == ["tokenizer.json"]
    assert not modes.keys() & others
    assert load_file(tmp_path / "out/model.safetensors").keys()


LIMITED = """
import resource, sys
from pathlib import Path
from infinigen_jax.checkpoint.torch_file import TorchFile
from infinigen_jax.errors import InputError
from infinigen_jax.checkpoint.safetensors import SafetensorsFile
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
for name in sys.argv[1:]:
    try:
        file = (TorchFile if name.endswith(".bin") else SafetensorsFile)(Path(name))
        {file.read(tensor).sum() for tensor in file.tensors}
    except InputError as error:
        print(name, "refused", error)
"""
TUPLES = b"\x80\x02)" + b"2\x86" * 60  # each twice in the next: 2^60 in the last
PICKLES = {
    "memo index": b"\x80\x02X\1\0\0\0ar" + (1 << 28).to_bytes(4, "little") + b".",
    "length": b"\x80\x05\x96" + (1 << 33).to_bytes(8, "little") + b"a.",
    "tuples as a key": b"\x80\x02}" + TUPLES[2:] + b"K\1s.",
    "tuples as a message": b"\x80\x02}X\1\0\0\0a" + TUPLES[2:] + b"s.",
    "deep tuples": b"\x80\x02})" + b"\x85" * 1_000_000 + b"K\1s.",
}


def test_sizes_that_a_file_claims_take_no_memory(tmp_path):
    """Each of these has a few bytes, or compresses to a few, and describes gigabytes."""
    files = []
    for number, (name, data) in enumerate(PICKLES.items()):
        files.append(tmp_path / f"{number} {name}.bin")
        with zipfile.ZipFile(files[-1], "w") as archive:
            archive.writestr("archive/data.pkl", data)
    files.append(tmp_path / "deflated.bin")
    with zipfile.ZipFile(files[-1], "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("archive/data.pkl", "w") as member:
            for _ in range(1 << 7):
                member.write(bytes(1 << 20))
    shapes = {"many": [1 << 62] * 200_000, "large": [0, 10**4000], "strides": [0, 1 << 40, 1 << 40]}
    for name, shape in shapes.items():
        files.append(tmp_path / f"{name}.safetensors")
        entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
        text = json.dumps({"a": entry}).encode()
        files[-1].write_bytes(len(text).to_bytes(8, "little") + text)
    files.append(tmp_path / "header.safetensors")
    files[-1].write_bytes((1 << 30).to_bytes(8, "little"))
    os.truncate(files[-1], 1 << 31)
    done = python("-c", LIMITED, *files)
    assert done.returncode == 0 and not done.stderr, done.stderr
    refused = done.stdout.splitlines()
    assert len(refused) == len(files) and max(map(len, refused)) < 1000


def test_a_tensor_that_repeats_its_storage(tmp_path):
    """Strides of zero: four bytes as a tensor of any size."""
    import torch

    torch.save({"a": torch.ones(1).expand(1 << 40)}, tmp_path / "a.bin")
    refuses("a repeats its storage", TorchFile(tmp_path / "a.bin").read, "a")


def test_only_checked_files_of_a_conversion_are_read(tmp_path):
    """Weights by an index, and end-of-sequence tokens, that the manifest does not know."""
    out = tmp_path / "out"
    shutil.copytree(checkpoint.embedded("books-llama"), out)
    before = checkpoint.load(out, "float32")
    other = SafetensorsFile(out / "infinigen.safetensors").tensors
    index = {"weight_map": dict.fromkeys(other, "infinigen.safetensors")}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    assert checkpoint.load(out, "float32").config == before.config
    (out / "generation_config.json").write_text('{"eos_token_id": 7}')
    refuses("generation_config.json: not of this conversion", checkpoint.load, out, "float32")


def test_text_that_is_not_unicode(tmp_path):
    """Tokenizers do not take it in the name of a folder."""
    folder = source(tmp_path / os.fsdecode(b"m\xff"))
    refuses("the name is not UTF-8", checkpoint.load, folder)
