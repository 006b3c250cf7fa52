"""Sources of a conversion: a Hugging Face folder or a GGUF file."""

from pathlib import Path
from typing import Any

from infinigen_jax.checkpoint import gguf_model, hf_folder
from infinigen_jax.checkpoint.gguf_file import GgufFile
from infinigen_jax.checkpoint.manifest import MANIFEST_FILE
from infinigen_jax.checkpoint.tensor_names import expected, match
from infinigen_jax.checkpoint.tensor_source import TensorSource
from infinigen_jax.errors import InputError
from infinigen_jax.files.regular import expanded, read_json
from infinigen_jax.models import Blueprint, ModelConfig

FOUR_BITS = 5  # bits of a number and its share of the scales: Q4_1 has these, Q5_0 more


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == gguf_model.SUFFIX and not path.is_dir()


def checked_source(path: str | Path) -> Path:
    """Check that a path is a GGUF file or a folder whose tokenizer files are safe to open."""
    source = expanded(path)
    return source if is_gguf(source) and source.exists() else hf_folder.checked_folder(source)


def read_config(source: Path) -> tuple[dict[str, Any], ModelConfig]:
    """Return `config.json`, or its equivalent, as parsed JSON and as a ModelConfig."""
    if is_gguf(source):
        return gguf_model.read_config(GgufFile(source))
    return hf_folder.read_config(source)


def open_tensors(source: Path) -> dict[str, TensorSource]:
    if is_gguf(source):
        return gguf_model.open_tensors(GgufFile(source))
    return hf_folder.open_tensors(source)


def wide_matrices(source: Path, architecture: Blueprint) -> frozenset[str]:
    """Return the names of a layer's matrices in more than four bits, if it has others in four.

    Layers share programs, so that a matrix is wide in all of them if it is in one.
    """
    manifest = source / MANIFEST_FILE
    if not is_gguf(source) and manifest.exists():  # of any version: it may be converted again
        given = read_json(manifest).get("wide")
        return frozenset(map(str, given) if isinstance(given, list) else ())
    specs = [spec for layer in expected(architecture).layers for spec in layer]
    matrices = [spec for spec in specs if spec.is_matrix]
    if is_gguf(source):
        bits = gguf_model.stored_bits(GgufFile(source))
    else:
        bits = _stored_bits(source, architecture)
    wide = [spec.path[0] for spec in matrices if bits.get(spec.name, 0) > FOUR_BITS]
    names = {*wide} if len(wide) < len(matrices) else set()
    # They are joined, see `models.linear`.
    return frozenset(names | {"q", "kv"} if names & {"q", "kv", "qkv"} else names)


def _stored_bits(folder: Path, architecture: Blueprint) -> dict[str, int]:
    """Return the bits of a number in each tensor of a folder; empty without matrices in four."""
    try:
        tensors = hf_folder.open_tensors(folder)
        if all(tensor.bits != 4 for tensor in tensors.values()):
            return {}
        sources = match(tensors, architecture, folder)
    except InputError:  # `plan` may have no weights; others are refused when they are read
        return {}
    return {name: x.bits or 8 * x.dtype.itemsize for name, x in sources.items()}


def content_files(source: Path) -> dict[str, Path]:
    """Return the files whose contents determine a conversion, by names of their roles."""
    if is_gguf(source):
        return {f"model{gguf_model.SUFFIX}": source}
    files = [*hf_folder.weight_files(source), *hf_folder.side_files(source)]
    return {file.name: file for file in [source / "config.json", *files]}
