"""Reading a Hugging Face folder: `config.json`, then tensors one at a time, memory-mapped.

Weights may be `model.safetensors` or `pytorch_model.bin`, each single or sharded with an index.
Nothing is loaded on opening: a `TensorSource` knows its shape and dtype and reads on request.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from infinigen_jax.errors import InputError, UnsupportedModelError
from infinigen_jax.models import ModelConfig, config_from_hf
from infinigen_jax.models.hf import end_tokens
from infinigen_jax.safetensors_io import SafetensorsFile

SAFETENSORS = "model.safetensors"
TORCH = "pytorch_model.bin"


class TensorSource(NamedTuple):
    """A tensor in a checkpoint: where it is, what it looks like, and how to read it."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]


def checked_folder(path: str | Path) -> Path:
    """The folder itself, or an InputError saying what is there instead."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise InputError(f"{folder}: is a file; give the folder that holds config.json")
    raise InputError(
        f"{folder}: no such folder; give a model folder on disk, nothing is downloaded"
    )


def read_json(path: Path, remedy: str = "download it again") -> dict[str, Any]:
    """Parse a JSON object from a file.

    Raises:
        InputError: when the file is missing, unreadable or not a JSON object.
    """
    try:
        value = json.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: missing; {remedy}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error}); {remedy}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: not a JSON object; {remedy}")
    return value


def read_config(folder: Path) -> tuple[dict[str, Any], ModelConfig]:
    """`config.json` as it is, and as this package understands it.

    End-of-sequence tokens come from `generation_config.json` too, where instruction-tuned models
    list the ones that end a turn.

    Raises:
        InputError, UnsupportedModelError: before any weight file is opened.
    """
    remedy = "a Hugging Face model folder has one: give such a folder, or get the file again"
    hf = read_json(folder / "config.json", remedy)
    try:
        config = config_from_hf(hf)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{folder}/{error}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise InputError(f"{folder}/config.json: a setting has a wrong kind ({error})") from None
    generation = folder / "generation_config.json"
    settings = read_json(generation) if generation.exists() else {}
    if settings.get("eos_token_id") is None:
        return hf, config
    try:
        eos_ids = end_tokens(settings, config.vocab_size)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{folder}/generation_{error}") from None
    return hf, dataclasses.replace(config, eos_ids=eos_ids)


def open_tensors(folder: Path) -> dict[str, TensorSource]:
    """All tensors of a model folder by name; safetensors are preferred to torch files.

    Raises:
        InputError: for missing or damaged files, an index that does not fit its shards, and
            tensors that occur in two shards.
    """
    for single, opened in ((SAFETENSORS, _open_safetensors), (TORCH, _open_torch)):
        index = folder / f"{single}.index.json"
        if index.exists():
            return _open_sharded(index, opened)
        if (folder / single).exists():
            return opened(folder / single)
    raise InputError(f"{folder}: {_why_no_weights(folder)}")


def _why_no_weights(folder: Path) -> str:
    if any(folder.glob("*-of-*.safetensors")) or any(folder.glob("*-of-*.bin")):
        return "the weights are sharded but their index (*.index.json) is missing; get it again"
    others = [f.name for kind in ("h5", "msgpack", "gguf", "pth") for f in folder.glob(f"*.{kind}")]
    seen = f" ({sorted(others)[0]} is of another kind)" if others else ""
    return f"no weights here{seen}; {SAFETENSORS} or {TORCH} is needed"


def _open_safetensors(path: Path) -> dict[str, TensorSource]:
    file = SafetensorsFile(path)

    def reader(name: str) -> Callable[[], np.ndarray]:
        return lambda: file.read(name)

    return {
        name: TensorSource(name, path, info.shape, info.dtype, reader(name))
        for name, info in file.tensors.items()
    }


def _open_torch(path: Path) -> dict[str, TensorSource]:
    from infinigen_jax.convert.torch_file import TorchFile

    file = TorchFile(path)

    def reader(name: str) -> Callable[[], np.ndarray]:
        return lambda: file.read(name)

    return {
        name: TensorSource(name, path, tensor.shape, tensor.dtype, reader(name))
        for name, tensor in file.tensors.items()
    }


def _open_sharded(
    index: Path, opened: Callable[[Path], dict[str, TensorSource]]
) -> dict[str, TensorSource]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index}: has no weight_map; get it again")
    shards = sorted({str(shard) for shard in weight_map.values()})
    escaping = [shard for shard in shards if Path(shard).name != shard]
    if escaping:
        raise InputError(f"{index}: {escaping[0]!r} is not a file name in this folder")
    missing = [shard for shard in shards if not (index.parent / shard).exists()]
    if missing:
        raise InputError(f"{index}: names missing files: {', '.join(missing)}; get them again")
    tensors: dict[str, TensorSource] = {}
    for shard in shards:
        for name, tensor in opened(index.parent / shard).items():
            if name in tensors:
                raise InputError(f"{index}: {name} is in {tensors[name].file.name} and in {shard}")
            tensors[name] = tensor
    lost = [name for name, shard in weight_map.items() if _elsewhere(tensors, name, shard)]
    if lost:
        raise InputError(f"{index}: {lost[0]} is not in {weight_map[lost[0]]}; get both again")
    return tensors


def _elsewhere(tensors: dict[str, TensorSource], name: str, shard: str) -> bool:
    return name not in tensors or tensors[name].file.name != shard
