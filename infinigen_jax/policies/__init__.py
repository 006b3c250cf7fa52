"""Policies: which cached rows a layer attends to. A policy is one file here (docs/policies.md)."""

import importlib
import inspect
import pkgutil
from typing import Any

from infinigen_jax.policies.base import Policy
from infinigen_jax.policies.full import Full
from infinigen_jax.policies.h2o import H2O
from infinigen_jax.policies.infinigen import InfiniGen
from infinigen_jax.policies.infinigen_paper import InfiniGenPaper
from infinigen_jax.policies.oracle import Oracle
from infinigen_jax.policies.previous_query import PreviousQuery
from infinigen_jax.policies.quest import Quest
from infinigen_jax.policies.window import Window

__all__ = [
    "H2O",
    "POLICIES",
    "Full",
    "InfiniGen",
    "InfiniGenPaper",
    "Oracle",
    "Policy",
    "PreviousQuery",
    "Quest",
    "Window",
]


def _found() -> dict[str, Any]:
    """Every class in this folder's files that has a name of its own, by that name."""
    found: dict[str, Any] = {}
    for file in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{file.name}")
        for kind in vars(module).values():
            if not inspect.isclass(kind) or kind.__module__ != module.__name__:
                continue
            name = vars(kind).get("name")
            if isinstance(name, str) and found.setdefault(name, kind) is not kind:
                raise TypeError(f"two policies are named {name}: {found[name]} and {kind}")
    return found


POLICIES = _found()
