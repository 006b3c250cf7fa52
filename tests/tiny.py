"""Small random Hugging Face models, and helpers of several tests."""

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from scipy.special import log_softmax

from infinigen_jax import InputError, Model, embedded
from infinigen_jax.models import ModelConfig, blueprint
from infinigen_jax.models.forward import forward

COMMON: dict[str, Any] = {"vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 2}
COMMON |= {"num_attention_heads": 4, "max_position_embeddings": 64}
COMMON |= {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}

LLAMA = {"model_type": "llama", "vocab_size": 96, "hidden_size": 8, "intermediate_size": 8}
LLAMA |= {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64}

VISION: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "image_size": 28},
    **{"num_attention_heads": 2, "patch_size": 14},
    **{"depth": 1, "num_heads": 2, "out_hidden_size": 48, "deepstack_visual_indexes": [0]},
}
ROOT = Path(__file__).resolve().parent.parent
TEXT = [int(i) for i in np.random.default_rng(1).integers(3, 96, 40)]  # for calibration


class TinyModel:
    """Random transformers model and the folder that it was saved to."""

    def __init__(self, folder: Path, model: Any):
        self.folder, self.model = folder, model

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        import torch

        with torch.no_grad():
            return self.model(torch.tensor(tokens)).logits.float().numpy()


def make_tiny(folder: Path, family: str, seed: int = 0, **settings: Any) -> TinyModel:
    """Create a tiny model with random weights, biases and norms, and save it to `folder`."""
    import torch
    import transformers

    sizes: dict[str, Any] = {"intermediate_size": 56, "num_key_value_heads": 4}
    if family == "opt":
        sizes = {"ffn_dim": 56, "word_embed_proj_dim": COMMON["hidden_size"]}
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family, **(COMMON | sizes | settings))
    build = transformers.AutoModelForCausalLM
    if family == "muse_glimmer_text":  # transformers has it only with images
        config = transformers.MuseGlimmerConfig(text_config=config, vision_config=VISION)
        build = transformers.AutoModelForImageTextToText
    # The plain implementation; others leave soft caps out.
    model = build.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = "norm" in name and name.endswith("weight")
            parameter.normal_(mean=1.0 if norm else 0.0, std=0.15)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):  # of Gemma 4
                buffer.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return TinyModel(folder, model)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Return normally distributed random numbers of a shape, in float32."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def add_tokenizer(folder: Path) -> Path:
    """Copy the embedded models' tokenizer into a folder."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(embedded() / name, folder / name)
    return folder


class Letters:
    """Tokenizer with a character for each token."""

    convert_ids_to_tokens = staticmethod(chr)

    @staticmethod
    def decode(tokens: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, tokens))


def environment(cache: Path | None = None, **variables: str) -> dict[str, str]:
    """Return variables of a process on the CPU that imports this checkout's package.

    Args:
        cache: the process's user cache; it then does not share the tests' compiled programs.
    """
    result = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | variables
    if cache is None:
        return result
    result = {name: value for name, value in result.items() if "COMPILATION_CACHE" not in name}
    return result | {"XDG_CACHE_HOME": str(cache)}


def python(*arguments: str | Path, **variables: Any) -> subprocess.CompletedProcess[str]:
    """Run Python in an `environment`."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=environment(**variables), capture_output=True, text=True)


def started(*arguments: str | Path, **options: Any) -> Any:
    """Start Python, with a pipe for each stream that is not given; Ctrl-C ends it."""
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    options = {"env": environment(), **streams} | options
    with interruptible():
        return subprocess.Popen([sys.executable, *map(str, arguments)], **options)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C interrupt this process, and those that it starts.

    A shell starts background processes with the signal ignored, and their children inherit this.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@functools.cache
def compiled_forward(config: ModelConfig, dtype: Any) -> Any:
    """Return the plain forward pass, compiled once for a shape."""
    return jax.jit(functools.partial(forward, blueprint(config, dtype)))


def logits_of(model: Model, tokens: np.ndarray) -> np.ndarray:
    """Return logits [b, s, v] of a loaded model, without cache or skewing."""
    run = compiled_forward(model.config, model.dtype)
    return np.asarray(run(model.params, jnp.asarray(tokens)))


def log_probs_of(model: Model, tokens: np.ndarray) -> np.ndarray:
    """Return log-probabilities [b, s, v] by a plain pass, in float64."""
    return log_softmax(logits_of(model, tokens).astype(np.float64), axis=-1)


def text_log_probs(model: Model, tokens: np.ndarray) -> np.ndarray:
    """Return log-probabilities [b, s - 1] of a text's tokens after the first, by a plain pass."""
    log_probs, following = log_probs_of(model, tokens)[:, :-1], tokens[:, 1:, None]
    return np.take_along_axis(log_probs, following, axis=-1)[..., 0]


def refuses(message: str, function: Any, /, *arguments: Any, **settings: Any) -> str:
    """Check that a call ends with an InputError of one line that has a pattern; return the line."""
    with pytest.raises(InputError, match=message) as caught:
        function(*arguments, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def only(folder: Path, *names: str) -> list[str]:
    """Return names in a folder except `names`, hidden files included."""
    return sorted(path.name for path in folder.iterdir() if path.name not in names)


def take_tensors(folder: Path) -> dict[str, Any]:
    """Take the tensors out of a folder: its model.safetensors is removed."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    return tensors


def as_torch(folder: Path, shards: int = 1) -> None:
    """Turn a folder's model.safetensors into pytorch_model.bin."""
    import torch

    tensors = take_tensors(folder)
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


LAYERS = 3  # of shallow models: two that may be dense, and one whose rows are fetched
OF_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def make_shallow(source: Path, target: Path, layers: int = LAYERS) -> None:
    """Write a converted folder with the first layers of another one, which compile faster."""
    shutil.copytree(source, target)
    config = json.loads((source / "config.json").read_text())
    number = config["num_hidden_layers"]
    (target / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    for path in target.glob("*.safetensors"):
        tensors = {}
        for name, tensor in load_file(path).items():
            layer = OF_LAYER.search(name)
            if layer is not None and int(layer[1]) >= layers:
                continue
            of_all = path.name == "infinigen.safetensors" and name != "row_shares"
            assert not of_all or len(tensor) == number
            tensors[name] = tensor[:layers] if of_all else tensor
        save_file(tensors, path, {"format": "pt"})
    manifest = json.loads((target / "infinigen.json").read_text())
    for name in manifest["files"]:
        data = (target / name).read_bytes()
        manifest["files"][name] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    (target / "infinigen.json").write_text(json.dumps(manifest))
