"""Small random Hugging Face models, and logits of ours to compare with theirs."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from infinigen_jax.checkpoint import Model
from infinigen_jax.models import blueprint
from infinigen_jax.models.forward import forward

COMMON = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
}


class TinyModel:
    """A random transformers model and the folder that it was saved to."""

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

    if family == "llama":
        config = transformers.LlamaConfig(**(COMMON | {"intermediate_size": 56} | settings))
        kind = transformers.LlamaForCausalLM
    else:
        sizes = {"ffn_dim": 56, "word_embed_proj_dim": COMMON["hidden_size"]}
        config = transformers.OPTConfig(**(COMMON | sizes | settings))
        kind = transformers.OPTForCausalLM
    torch.manual_seed(seed)
    model = kind(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = "norm" in name and name.endswith("weight")
            parameter.normal_(mean=1.0 if norm else 0.0, std=0.15)
    model.save_pretrained(folder)
    return TinyModel(folder, model)


def logits_of(model: Model, tokens: np.ndarray) -> np.ndarray:
    """Logits [b, s, v] of a loaded model, without cache or skewing."""
    run = jax.jit(functools.partial(forward, blueprint(model.config, model.dtype)))
    return np.asarray(run(model.params, jnp.asarray(tokens)))
