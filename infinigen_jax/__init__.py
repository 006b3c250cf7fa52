"""JAX text generation with the KV cache in host memory (InfiniGen, OSDI 2024).

import infinigen_jax as ig

model = ig.load("path")  # a converted folder, or one from Hugging Face
engine = ig.Engine(model, policy=ig.InfiniGen(budget=0.1))
for step in engine.stream(["Once upon a time"], max_new_tokens=64):
    print(step.texts[0], end="", flush=True)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infinigen_jax.engine.conversation import Conversation
    from infinigen_jax.engine.engine import Engine
    from infinigen_jax.engine.generation import Run
    from infinigen_jax.engine.results import Choice, Generation, Stats, Step
    from infinigen_jax.engine.settings import EngineSettings
    from infinigen_jax.errors import InputError, UnsupportedModelError
    from infinigen_jax.loading.load import Basis, Model, embedded, load
    from infinigen_jax.policies import Full, InfiniGen, InfiniGenPaper
    from infinigen_jax.settings.pool import Pool
    from infinigen_jax.settings.sampling import Sampling

__version__ = "0.2.0.dev0"

_HOMES = {
    "loading.load": ("Basis", "Model", "embedded", "load"),
    "engine.conversation": ("Conversation",),
    "engine.engine": ("Engine",),
    "engine.results": ("Choice", "Generation", "Stats", "Step"),
    "engine.settings": ("EngineSettings",),
    "errors": ("InputError", "UnsupportedModelError"),
    "engine.generation": ("Run",),
    "policies": ("Full", "InfiniGen", "InfiniGenPaper"),
    "settings.pool": ("Pool",),
    "settings.sampling": ("Sampling",),
}

__all__ = [
    "Basis",
    "Choice",
    "Conversation",
    "Engine",
    "EngineSettings",
    "Full",
    "Generation",
    "InfiniGen",
    "InfiniGenPaper",
    "InputError",
    "Model",
    "Pool",
    "Run",
    "Sampling",
    "Stats",
    "Step",
    "UnsupportedModelError",
    "__version__",
    "embedded",
    "load",
]


def __getattr__(name: str) -> Any:
    """Import on first use: a command line reports a bad option before JAX is loaded."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"infinigen_jax.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names; some may not be imported yet."""
    return list(__all__)
