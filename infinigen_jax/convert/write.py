"""Files that a conversion takes over from its source, and checks made before any work."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from infinigen_jax.checkpoint.gguf_file import GgufFile
from infinigen_jax.checkpoint.hf_folder import TensorSource, side_files, weight_files
from infinigen_jax.checkpoint.manifest import MANIFEST_FILE
from infinigen_jax.checkpoint.safetensors import tensor_bytes
from infinigen_jax.checkpoint.source import is_gguf
from infinigen_jax.errors import InputError, ParameterError
from infinigen_jax.files.atomic import copy_file, write_text
from infinigen_jax.files.regular import expanded, open_regular
from infinigen_jax.numeric import listed
from infinigen_jax.text.gguf_tokenizer import gguf_tokenizer, tokenizer_files
from infinigen_jax.text.tokenizer import Tokenizer, load_tokenizer

WEIGHT_DTYPES = {name: np.dtype(name) for name in ("float32", "bfloat16", "float16")}
# Fields of config.json that would reveal a path of the machine that wrote it.
PATHS = ("_name_or_path", "name_or_path")


def check_destination(source: Path, destination: Path, force: bool) -> Path:
    """Refuse a destination that must not be written; return its resolved path."""
    target, origin = expanded(destination).resolve(), source.resolve()
    if target == origin:
        raise InputError(f"{destination}: source and destination are the same folder")
    if target in origin.parents:
        raise InputError(f"{destination}: contains the source folder; choose another destination")
    if not target.exists():
        return target
    if not force:
        raise InputError(f"{destination}: already exists; choose another folder or give `force`")
    replaceable = target.is_dir() and (
        (target / MANIFEST_FILE).exists() or not any(target.iterdir())
    )
    if not replaceable:
        raise InputError(
            f"{destination}: is not a converted model, so `force` does not replace it; "
            "choose another folder"
        )
    return target


def open_tokenizer(source: Path) -> Tokenizer:
    return gguf_tokenizer(GgufFile(source)) if is_gguf(source) else load_tokenizer(source)


def side_files_of(source: Path, tokenizer: Callable[[], Tokenizer]) -> dict[str, Path | str]:
    """Return the files of a conversion except weights and config.json: texts, or files to copy."""
    if is_gguf(source):
        return {**tokenizer_files(tokenizer())}
    return {file.name: file for file in side_files(source)}


def write_side_file(path: Path, content: Path | str) -> None:
    if isinstance(content, str):
        write_text(path, content)
    else:
        with open_regular(content) as file:
            copy_file(file, path)


def unchanged_files(
    source: Path, sources: Mapping[str, TensorSource], dtype: str | None
) -> list[Path]:
    """Return the weight files that a conversion can use as they are; none if it changes weights."""
    wanted = WEIGHT_DTYPES.values() if dtype is None else [WEIGHT_DTYPES[dtype]]
    for tensor in sources.values():
        if tensor.file.suffix != ".safetensors" or tensor.dtype not in wanted:
            return []
    return weight_files(source)


def weight_dtype(dtype: str | None, sources: Mapping[str, TensorSource]) -> np.dtype:
    """Return the requested dtype, or the one that most stored elements have."""
    if dtype is not None:
        if dtype not in WEIGHT_DTYPES:
            raise ParameterError("dtype", f"use {listed([*WEIGHT_DTYPES])}", dtype)
        return WEIGHT_DTYPES[dtype]
    sizes: dict[np.dtype, int] = {}
    for tensor in sources.values():
        count = tensor_bytes(np.uint8, tensor.shape)
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + count
    most = max(sizes, key=lambda kind: sizes[kind])
    return most if most in WEIGHT_DTYPES.values() else WEIGHT_DTYPES["float32"]


def converted_config(hf: Mapping[str, Any], dtype: np.dtype) -> dict[str, Any]:
    """Return config.json of the converted folder: the source's, with the dtype, without paths."""
    config = {name: value for name, value in hf.items() if name not in PATHS}
    if "torch_dtype" in config:  # name before transformers 5
        config["torch_dtype"] = dtype.name
    return config | {"dtype": dtype.name}
