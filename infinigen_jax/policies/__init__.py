"""Policies: which cached rows a layer attends to. A policy is one file here (docs/policies.md).

An entry point of the group ENTRY_POINTS, or a path, names a policy of another package.

Imports speculation and what it imports. Start reading at base.py.
"""

import dataclasses
import importlib
import importlib.metadata
import inspect
import pkgutil
from typing import Any

from infinigen_jax.errors import EXTENSIONS, ParameterError, one_line
from infinigen_jax.numeric import listed
from infinigen_jax.policies.base import Policy as Policy
from infinigen_jax.policies.full import Full as Full
from infinigen_jax.policies.h2o import H2O as H2O
from infinigen_jax.policies.infinigen import InfiniGen as InfiniGen
from infinigen_jax.policies.infinigen_paper import InfiniGenPaper as InfiniGenPaper
from infinigen_jax.policies.oracle import Oracle as Oracle
from infinigen_jax.policies.previous_query import PreviousQuery as PreviousQuery
from infinigen_jax.policies.quest import Quest as Quest
from infinigen_jax.policies.window import Window as Window

ENTRY_POINTS = "infinigen_jax.policies"


def _found() -> dict[str, Any]:
    """Return the policy classes in this folder's files by name."""
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


def find_policy(name: str) -> Any:
    """Return the class of a policy.

    Args:
        name: a policy in this package, an entry point of the group ENTRY_POINTS, or a class such
            as "package.module:MyPolicy".
    """
    if name in POLICIES:
        return POLICIES[name]
    (entry, *_) = (*importlib.metadata.entry_points(group=ENTRY_POINTS, name=name), None)
    if entry is None and ":" not in name:
        remedy = f"use {listed([*POLICIES, 'a class such as package.module:MyPolicy'])}"
        raise ParameterError("policy", remedy, name)
    module, _, attribute = name.partition(":")
    try:
        kind = (
            getattr(importlib.import_module(module), attribute) if entry is None else entry.load()
        )
    except Exception as error:  # the module's own code may raise anything
        problem = f"{type(error).__name__}: {one_line(str(error))}"
        missing = isinstance(error, ImportError) and f"{module}.".startswith(f"{error.name}.")
        where = "; is it on PYTHONPATH?" if missing else ""
        raise ParameterError("policy", problem + where, name) from None
    check_policy(kind, name)
    EXTENSIONS.add(inspect.getfile(kind))
    return kind


def check_policy(kind: Any, name: str) -> None:
    """Raise ParameterError for a class that is no policy."""
    if problem := _problem(kind):
        raise ParameterError("policy", f"{problem}, see docs/policies.md", name)


def _problem(kind: Any) -> str:
    """Return what keeps a class from being a policy; empty if nothing does."""
    if not (inspect.isclass(kind) and issubclass(kind, Policy) and dataclasses.is_dataclass(kind)):
        return "not a policy: derive a frozen dataclass from `Budgeted`"
    if not hasattr(kind, "name"):
        return "a policy needs a `name`"
    for method in ("request_size", "select", "init", "append", "observe_queries", "observe"):
        base, own = getattr(Policy, method), getattr(kind, method)
        if own is base and method in ("request_size", "select"):
            return f"a policy needs the method `{method}`"
        try:
            inspect.signature(own).bind(*inspect.signature(base).parameters)
        except TypeError as error:
            return f"`{method}`: {error}"
    return ""
