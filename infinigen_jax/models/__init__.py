"""Model families. A family is one file here, chosen by `model_type` in config.json."""

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from infinigen_jax.errors import UnsupportedModelError
from infinigen_jax.models.base import Blueprint, ModelConfig, Params, blueprint, random_params

FAMILIES = ("llama", "opt")

__all__ = [
    "FAMILIES",
    "Blueprint",
    "ModelConfig",
    "Params",
    "blueprint",
    "config_from_hf",
    "family",
    "random_params",
]


def family(name: str) -> ModuleType:
    """The module that defines a family: its Layer, its Embedding and its `config_from_hf`."""
    return importlib.import_module(f"infinigen_jax.models.{name}")


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translate a parsed `config.json`.

    Raises:
        UnsupportedModelError: for a model_type or a setting that is not implemented.
    """
    name = hf.get("model_type")
    if name not in FAMILIES:
        raise UnsupportedModelError(
            f"config.json: model_type {name!r} is not supported (supported: {', '.join(FAMILIES)})"
        )
    return family(name).config_from_hf(hf)
