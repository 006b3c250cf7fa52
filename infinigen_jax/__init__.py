"""JAX text generation with the KV cache in host memory (InfiniGen, OSDI 2024).

    import infinigen_jax as ig

    model = ig.load("path")  # a converted folder, or one from Hugging Face
    engine = ig.Engine(model, policy=ig.InfiniGen(budget=0.1))
    for step in engine.stream(["Once upon a time"], max_new_tokens=64):
        print(step.texts[0], end="", flush=True)
"""

from infinigen_jax.checkpoint import Basis, Model, embedded, load
from infinigen_jax.engine import Engine, Generation, Run, Stats, Step
from infinigen_jax.errors import InputError, UnsupportedModelError
from infinigen_jax.policies import Full, InfiniGen
from infinigen_jax.sampling import Sampling

__all__ = [
    "Basis",
    "Engine",
    "Full",
    "Generation",
    "InfiniGen",
    "InputError",
    "Model",
    "Run",
    "Sampling",
    "Stats",
    "Step",
    "UnsupportedModelError",
    "embedded",
    "load",
]
