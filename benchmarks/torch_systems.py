"""transformers with the same weights and one of its three caches, as a bare greedy loop.

The loop omits the overhead that `generate` adds to each token. DLPack shares the weights, in
transformers' layout, without another copy on the host.
"""

import inspect
import os
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from benchmarks import shapes
from benchmarks.machine import note
from benchmarks.systems import MARGIN, StepTime, System
from infinigen_jax.checkpoint.tensor_names import TensorSpec, expected
from infinigen_jax.loading.load import Model
from infinigen_jax.models import Params, blueprint
from infinigen_jax.models.base import split_layers
from infinigen_jax.models.forward import forward

LOGITS_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}  # of the largest logit
PROMPT = 64  # tokens of the prompt that compares the two models


class Transformers(System):
    """Generation in progress with a result of `torch_model` and a cache of `systems.THEIRS`.

    On a CPU it takes the faster of all cores and a single thread, because with small matrices a
    second thread can cost more than it saves.
    """

    def __init__(self, model: Any, name: str, prompts: list[list[int]], new_tokens: int):
        self.model, self.threads = model, len(os.sched_getaffinity(0))
        self._choose_threads = model.device.type == "cpu"
        self.drawn: list[int] = []
        torch.set_num_threads(self.threads)
        ids = torch.tensor(prompts, device=model.device)
        start = time.perf_counter()
        with torch.inference_mode():
            offloading = name == "transformers-offloaded"
            cache = transformers.DynamicCache(config=model.config, offloading=offloading)
            output = model(ids, **with_cache(model, cache), logits_to_keep=1)
            self.next = output.logits[:, -1:].argmax(dim=-1)
            self.next.tolist()
            if name == "transformers-static":
                cache = _static(model, cache, ids.shape[1] + new_tokens + 1)
        self.cache = cache
        self.prefill_seconds = time.perf_counter() - start

    def warm_up(self, rounds: int, tokens: int) -> None:
        seconds: dict[int, float] = {}
        for index in range(rounds):
            if index == 2 and self._choose_threads:
                self.threads = 1
            took = self.round(tokens)
            if index:  # the first round meets cold memory
                seconds[self.threads] = took
        if self._choose_threads and seconds:
            self.threads = min(seconds, key=lambda threads: seconds[threads])

    def round(self, tokens: int) -> float:
        torch.set_num_threads(self.threads)
        for _ in range(MARGIN):
            self._step()
        start = time.perf_counter()
        for _ in range(tokens):
            self._step()
        return time.perf_counter() - start

    def step(self) -> StepTime:
        torch.set_num_threads(self.threads)
        start = time.perf_counter()
        self._step()
        return StepTime(time.perf_counter() - start)

    def facts(self) -> dict[str, Any]:
        return {"threads": self.threads, "prefill_seconds": self.prefill_seconds}

    def _step(self) -> None:
        with torch.inference_mode():
            output = self.model(input_ids=self.next, **with_cache(self.model, self.cache))
            self.drawn.append(int(self.next[0, 0]))
            self.next = output.logits[:, -1:].argmax(dim=-1)
            self.next.tolist()  # read on the host, as generation does


def with_cache(model: Any, cache: Any) -> dict[str, Any]:
    """Return call arguments with the cache, whose name changed in transformers 5.24."""
    names = inspect.signature(model.forward).parameters
    return {"cache" if "cache" in names else "past_key_values": cache, "use_cache": True}


def _static(model: Any, cache: Any, capacity: int) -> Any:
    """Return a static cache filled from a dynamic one, whose layers are freed one by one."""
    static = transformers.StaticCache(model.config, capacity)
    for i, layer in enumerate(cache.layers):
        static.update(layer.keys, layer.values, i)
        layer.keys = layer.values = None
    return static


def torch_model(model: Model, settings: dict[str, Any]) -> Any:
    """Return transformers' model of `config.json` settings, with the same weights and device."""
    settings = dict(settings)
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    config._attn_implementation = "sdpa"
    specs = expected(blueprint(model.config, model.dtype))
    state = {}
    params = shapes.with_plain_matrices(model).params
    layers = split_layers(model.config, params["layers"])
    trees = [params["embedding"], *layers]
    for part, tree in zip([specs.embedding, *specs.layers], trees, strict=True):
        state |= {spec.name: _tensor(spec, tree) for spec in part}
    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    with torch.device(device):  # built on its device, without a copy on the host
        other = transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, str(model.dtype))
        )
    missing, unexpected = other.load_state_dict(state, strict=False)
    tied = {"lm_head.weight"} if model.config.tie_embeddings else set()
    assert not unexpected and set(missing) <= tied, (missing, unexpected)
    return other.eval()


def _tensor(spec: TensorSpec, params: Params) -> Any:
    """Return a view of one of our arrays as the tensor of the file."""
    module, name = spec.path
    part = torch.split(torch.from_dlpack(params[module][name]), spec.shape[0])[spec.part]
    return part - 1 if spec.gain else part


def same_model(model: Model, settings: dict[str, Any]) -> tuple[Any, float]:
    """Return `torch_model`, and the largest difference of its logits, over the largest logit."""
    other, prompt = torch_model(model, settings), shapes.prompt(model.config, PROMPT)
    tokens = jnp.array([prompt], jnp.int32)
    architecture = blueprint(model.config, model.dtype)
    with jax.default_matmul_precision("highest"):
        logits = jax.jit(lambda params: forward(architecture, params, tokens))(model.params)
        mine = np.asarray(logits)
    with torch.inference_mode():
        theirs = other(torch.tensor([prompt], device=other.device)).logits.float().cpu().numpy()
    difference = float(np.abs(mine - theirs).max() / np.abs(theirs).max())
    note(f"logits differ from transformers' by {difference:.1e} of the largest")
    if not difference <= LOGITS_TOLERANCE[str(model.dtype)]:
        note("that is more than rounding explains: THE MODELS ARE NOT THE SAME")
    return other, difference
