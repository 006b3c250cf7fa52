"""The systems that are compared: generations in progress, of this package and of transformers.

Each is started with a prompt and then asked, round by round, for a number of further tokens; it
takes the time itself, because what belongs to a round differs. Contexts grow alike in all.
"""

import os
import time
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from infinigen_jax.checkpoint import Model
from infinigen_jax.convert.mapping import expected, write_tree
from infinigen_jax.engine import Engine
from infinigen_jax.models import blueprint
from infinigen_jax.models.forward import forward

WARMUP_ROUNDS = 3
MARGIN = 1  # tokens of a round that are drawn and not timed
LOGITS_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}  # of their largest


class System(Protocol):
    """A generation in progress; `drawn` are its tokens of the first sequence so far."""

    drawn: list[int]

    def warm_up(self, tokens: int) -> None:
        """WARMUP_ROUNDS rounds that do not count: compile, and settle what is to be settled."""
        ...

    def round(self, tokens: int) -> float:
        """Decode MARGIN + `tokens` tokens of every sequence; seconds for the latter."""
        ...


class Ours:
    """`Engine.start`, then its tokens one by one, as `Engine.generate` takes them."""

    def __init__(self, engine: Engine, prompts: list[list[int]], new_tokens: int):
        self.run = engine.start(prompts, new_tokens + 1)
        self.drawn: list[int] = []
        self._tokens = self.run.tokens(ignore_eos=True)

    def warm_up(self, tokens: int) -> None:
        for _ in range(WARMUP_ROUNDS):
            self.round(tokens)

    def round(self, tokens: int) -> float:
        # The engine dispatches a step ahead. The step that waited since the last round is read
        # first, so that exactly `tokens` steps begin and end inside the measured time, and the one
        # behind them ends before another system's turn.
        for _ in range(MARGIN):
            self._next()
        start = time.perf_counter()
        for _ in range(tokens):
            self._next()
        seconds = time.perf_counter() - start
        jax.block_until_ready((self.run.drawn, self.run.cache))
        return seconds

    def _next(self) -> None:
        token = next(self._tokens)[0]
        assert token is not None
        self.drawn.append(token)


class Transformers:
    """A bare greedy loop over a transformers model, without what `generate` adds to a token.

    Args:
        model: from `torch_model`.
        cache: of prompts that were read.
        first: [b, 1], the tokens drawn from them.
        threads: of torch; 0 for whichever decodes faster, one on each core or a single one: with
            small matrices a second thread can cost more than it does.
    """

    def __init__(self, model: Any, cache: Any, first: Any, threads: int):
        self.model, self.cache, self.next = model, cache, first
        self.threads = threads
        self.drawn: list[int] = []

    def warm_up(self, tokens: int) -> None:
        # As many rounds as WARMUP_ROUNDS says: the first one meets cold memory.
        cores, seconds, chosen = len(os.sched_getaffinity(0)), {}, self.threads
        for threads in (cores, cores, 1):
            self.threads = chosen or threads
            seconds[threads] = self.round(tokens)
        self.threads = chosen or min(seconds, key=lambda threads: seconds[threads])

    def round(self, tokens: int) -> float:
        import torch

        torch.set_num_threads(self.threads)
        with torch.inference_mode():
            for _ in range(MARGIN):
                self._step()
            start = time.perf_counter()
            for _ in range(tokens):
                self._step()
            return time.perf_counter() - start

    def _step(self) -> None:
        output = self.model(input_ids=self.next, past_key_values=self.cache, use_cache=True)
        self.drawn.append(int(self.next[0, 0]))
        self.next = output.logits[:, -1:].argmax(dim=-1)
        self.next.tolist()  # read on the host, as generation does


def torch_model(model: Model, settings: dict[str, Any]) -> Any:
    """The same weights in transformers' own model, on the same kind of device.

    Args:
        settings: its `config.json`.
    """
    import torch
    import transformers

    settings = dict(settings)
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    config._attn_implementation = "sdpa"
    slots = expected(blueprint(model.config, model.dtype))
    state = {}
    trees = [model.params["embedding"], *model.params["layers"]]
    for part, tree in zip([slots.embedding, *slots.layers], trees, strict=True):
        state |= {name: _tensor(array) for name, array in write_tree(part, tree)}
    other = transformers.AutoModelForCausalLM.from_config(
        config, dtype=getattr(torch, str(model.dtype))
    )
    missing, unexpected = other.load_state_dict(state, strict=False)
    tied = {"lm_head.weight"} if model.config.tie_embeddings else set()
    assert not unexpected and set(missing) <= tied, (missing, unexpected)
    return other.eval().to("cuda" if jax.default_backend() == "gpu" else "cpu")


def logits_difference(model: Model, other: Any, prompt: list[int]) -> float:
    """Largest difference of the two models' logits on a prompt, relative to the largest logit.

    Raises:
        ValueError: if it is too large for the dtype: then they are not the same model.
    """
    import torch

    tokens = jnp.array([prompt], jnp.int32)
    plan = blueprint(model.config, model.dtype)
    with jax.default_matmul_precision("highest"):
        mine = np.asarray(jax.jit(lambda params: forward(plan, params, tokens))(model.params))
    with torch.inference_mode():
        ids = torch.tensor([prompt], device=other.device)
        theirs = other(ids).logits.float().cpu().numpy()
    difference = float(np.abs(mine - theirs).max() / np.abs(theirs).max())
    if not difference <= LOGITS_TOLERANCE[str(model.dtype)]:
        raise ValueError(f"the models differ: logits by {difference:.2g} of the largest")
    return difference


def start_transformers(
    other: Any, prompts: list[list[int]], new_tokens: int, names: list[str], threads: int
) -> dict[str, Transformers]:
    """Read the prompts once; the static cache is filled from the dynamic one.

    Args:
        prompts: of equal lengths.
        names: of the systems wanted, "transformers" and "transformers-static".
        threads: see `Transformers`.
    """
    import torch
    import transformers

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    ids = torch.tensor(prompts, device=other.device)
    with torch.inference_mode():
        cache = transformers.DynamicCache(config=other.config)
        output = other(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        first = output.logits[:, -1:].argmax(dim=-1)
        systems = {}
        if "transformers-static" in names:
            static = transformers.StaticCache(other.config, ids.shape[1] + new_tokens + 1)
            for i, layer in enumerate(cache.layers):
                filled: Any = layer
                static.update(filled.keys, filled.values, i)
            systems["transformers-static"] = Transformers(other, static, first, threads)
        if "transformers" in names:
            systems["transformers"] = Transformers(other, cache, first, threads)
    return systems


def _tensor(array: np.ndarray) -> Any:
    import torch

    array = np.array(array)  # contiguous, and ours to write to
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)
