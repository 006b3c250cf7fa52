"""Reader of Hugging Face folders: `config.json`, then memory-mapped tensors one at a time.

Weights may be `model.safetensors` or `pytorch_model.bin`, each single or sharded with an index.
Opening reads no weights: a `TensorSource` knows its shape and dtype and reads on request.
`quantised` computes quantised matrices as they are read.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from infinigen_jax.checkpoint.quantised import check_quantisation, dequantised
from infinigen_jax.checkpoint.safetensors import SafetensorsFile
from infinigen_jax.checkpoint.tensor_source import TensorSource
from infinigen_jax.checkpoint.torch_file import TorchFile
from infinigen_jax.errors import InputError
from infinigen_jax.files.regular import LARGEST_JSON, expanded, open_regular, read_json
from infinigen_jax.models import ModelConfig, config_from_hf
from infinigen_jax.models.hf import end_tokens, errors_naming, language_model
from infinigen_jax.numeric import listed

EMBEDDED = ("books-llama", "tiny-llama", "tiny-opt")  # models in this package, by name
SAFETENSORS = "model.safetensors"
TORCH = "pytorch_model.bin"
LARGEST_SIDE_FILE = 8 * LARGEST_JSON  # bytes; tokenizers have up to 35 MB
# Files copied to a conversion: those that transformers reads, and licences. Python code that a
# folder may hold and unrelated files of the user are not copied.
SIDE_FILES = (
    *("generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("chat_template.jinja", "chat_template.json", "LICENSE*", "NOTICE*", "USE_POLICY*"),
)


def checked_folder(path: str | Path) -> Path:
    """Check that a path is a folder whose tokenizer files, if any, are safe to open."""
    folder = expanded(path)
    try:
        str(folder.absolute()).encode()
    except UnicodeEncodeError:
        raise InputError(
            f"{folder}: the name is not UTF-8, as tokenizers need; rename the folder"
        ) from None
    if folder.is_dir():
        for file in side_files(folder):  # transformers opens them unchecked
            open_regular(file, LARGEST_SIDE_FILE).close()
        return folder
    if folder.exists():
        raise InputError(f"{folder}: is a file; give a .gguf file or the folder of config.json")
    raise InputError(
        f"{folder}: no such folder; give a model's folder, a .gguf file, org/name on the hub or an "
        f"embedded model: {listed(EMBEDDED)}"
    )


def side_files(folder: Path) -> list[Path]:
    """List the files that a conversion copies, excluding config.json and weights.

    Folders of licences are left out. A folder in a file's place is listed, to be refused.
    """
    found = {path for pattern in SIDE_FILES for path in folder.glob(pattern)}
    return sorted(path for path in found if path.name in SIDE_FILES or not path.is_dir())


def weight_files(folder: Path) -> list[Path]:
    """List the weight files, an index first.

    As in transformers, safetensors take precedence over torch files, and one file over an index.
    """
    for single in (SAFETENSORS, TORCH):
        if os.path.lexists(folder / single):
            return [folder / single]
        index = folder / f"{single}.index.json"
        if os.path.lexists(index):
            names = shard_names(index)
            if missing := [name for name in names if not (folder / name).exists()]:
                absent = ", ".join(missing)
                raise InputError(f"{index}: names missing files: {absent}; get them again")
            return [index, *(folder / name for name in names)]
    raise InputError(f"{folder}: {_why_no_weights(folder)}")


def read_config(folder: Path) -> tuple[dict[str, Any], ModelConfig]:
    """Read `config.json`; return it as parsed JSON and as a ModelConfig.

    End-of-sequence tokens in `generation_config.json` take precedence, because instruction-tuned
    models list the tokens that end a turn only in it.
    """
    remedy = "a Hugging Face model folder has one: give such a folder, or get the file again"
    whole = read_json(folder / "config.json", remedy)
    with errors_naming(folder / "config.json"):
        hf = language_model(whole)
        if hf["model_type"] != whole.get("model_type"):
            # The two configurations may contradict each other. The weights decide, if they are
            # here; their errors are reported when they are read.
            with contextlib.suppress(InputError):
                heads = (name.endswith("lm_head.weight") for name in open_tensors(folder))
                hf["tie_word_embeddings"] = not any(heads)
        config = config_from_hf(hf)
        check_quantisation(hf.get("quantization_config"))
    generation = folder / "generation_config.json"
    settings = read_json(generation) if os.path.lexists(generation) else {}
    if settings.get("eos_token_id") is None:
        return hf, config
    with errors_naming(generation):
        eos_ids = end_tokens(settings, config.vocab_size)
    return hf, dataclasses.replace(config, eos_ids=eos_ids)


def open_tensors(folder: Path) -> dict[str, TensorSource]:
    """Open all tensors of a model folder, keyed by name; see `weight_files`."""
    return open_files(weight_files(folder))


def open_files(paths: Iterable[Path]) -> dict[str, TensorSource]:
    """Open all tensors of weight files, keyed by name; an index among them is passed over."""
    tensors: dict[str, TensorSource] = {}
    for path in paths:
        if path.suffix == ".json":
            continue
        file: SafetensorsFile | TorchFile
        file = SafetensorsFile(path) if path.suffix == ".safetensors" else TorchFile(path)
        release = getattr(file, "release", lambda name: None)
        for name, tensor in file.tensors.items():
            if name in tensors:
                raise InputError(f"{path}: two files have {name}; get them again")
            read, drop = functools.partial(file.read, name), functools.partial(release, name)
            tensors[name] = TensorSource(name, path, tensor.shape, tensor.dtype, read, drop)
    return dequantised(tensors)


def shard_names(index: Path) -> list[str]:
    """Return the names of the files that an index names; they may be missing from its folder."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index}: has no weight_map; get it again")
    kind = index.name.split(".")[1]
    for shard in weight_map.values():
        named = isinstance(shard, str) and "\0" not in shard and Path(shard).name == shard
        if not named or not shard.endswith(f".{kind}"):
            raise InputError(f"{index}: {shard!r} is not a file name in this folder, with .{kind}")
    return sorted(set(weight_map.values()))


def _why_no_weights(folder: Path) -> str:
    if any(folder.glob("*-of-*.safetensors")) or any(folder.glob("*-of-*.bin")):
        return "the weights are sharded but their index (*.index.json) is missing; get it again"
    if files := sorted(folder.glob("*.gguf")):
        return f"no weights here; to use {files[0].name}, give the path of that file"
    others = [f.name for kind in ("h5", "msgpack", "pth") for f in folder.glob(f"*.{kind}")]
    hint = f" ({sorted(others)[0]} has another format)" if others else ""
    return f"no weights here{hint}; {SAFETENSORS} or {TORCH} is needed"
