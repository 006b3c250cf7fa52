"""Import of a model family's module by its name."""

import importlib
from types import ModuleType


def family(name: str) -> ModuleType:
    """Return the module of a family: its Layer, its Embedding and its `config_from_hf`."""
    return importlib.import_module(f"infinigen_jax.models.{name}")
