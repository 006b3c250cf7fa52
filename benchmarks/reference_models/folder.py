"""A Hugging Face folder, as far as a report needs it: parameters and tokenizer, unconverted."""

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from infinigen_jax.convert.mapping import TRANSFORMS, expected, match, read_tree
from infinigen_jax.convert.reader import checked_folder, open_tensors, read_config
from infinigen_jax.errors import InputError
from infinigen_jax.models import Blueprint, ModelConfig, Params, blueprint


class Folder(NamedTuple):
    """A model in float32."""

    config: ModelConfig
    plan: Blueprint
    params: Params
    tokenizer: Tokenizer


def read_folder(path: Path) -> Folder:
    """Read a model folder; a converted one serves as well.

    Raises:
        InputError: naming what is missing or damaged.
    """
    folder = checked_folder(path)
    _, config = read_config(folder)
    plan = blueprint(config, jnp.float32)
    sources = match(open_tensors(folder), plan, folder)
    slots = expected(plan)
    params = {
        "embedding": read_tree(slots.embedding, sources, _joined),
        "layers": [read_tree(layer, sources, _joined) for layer in slots.layers],
    }
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # tokenizers raises bare exceptions
        raise InputError(f"{folder}/tokenizer.json: cannot be read ({error})") from None
    return Folder(config, plan, params, tokenizer)


def _joined(parts: list[np.ndarray], transform: str) -> jax.Array:
    turned = [TRANSFORMS[transform](part.astype(np.float32)) for part in parts]
    return jnp.asarray(np.concatenate(turned, axis=-1))
