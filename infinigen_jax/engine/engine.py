"""The engine: prompts in, tokens out, and what it took.

engine = Engine(load(path), policy=InfiniGen(budget=0.1))
for step in engine.stream(["Once upon a time"], max_new_tokens=64):
    ...
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from infinigen_jax.decode.layer import Decoder
from infinigen_jax.decode.state import Weights
from infinigen_jax.engine.conversation import Conversation
from infinigen_jax.engine.encoding import (
    Prompt,
    encode,
    encode_with_prefix,
    prefix_tokens,
    prompt_list,
)
from infinigen_jax.engine.generation import Run
from infinigen_jax.engine.results import Generation, Step
from infinigen_jax.engine.runtime import make_runtime
from infinigen_jax.engine.settings import EngineSettings
from infinigen_jax.errors import InputError
from infinigen_jax.loading.load import Model
from infinigen_jax.numeric import check_range
from infinigen_jax.policies import Policy
from infinigen_jax.prefill.prefill import Notify
from infinigen_jax.sampling import Sampling


class Engine:
    """Generates text with a model, a policy and a schedule.

    Args:
        model: from `load`.
        policy: which cached rows are fetched, or the name of a policy; `InfiniGen()` by default.
        mesh: devices, by the axes "data", which share the sequences, and "model", which share the
            KV heads; each keeps its part of the cache in its own host memory, and all weights. One
            device by default. Equal results.
        settings: the other fields of `EngineSettings`.

    Attributes:
        runtime: the model with its settings, which everything else is made from.

    Raises:
        InputError: for settings out of range, or that the model cannot have.
    """

    def __init__(
        self,
        model: Model,
        *,
        policy: Policy | str | None = None,
        mesh: Mesh | None = None,
        **settings: Any,
    ):
        self.runtime = make_runtime(model, EngineSettings.of(policy, **settings), mesh)

    @property
    def model(self) -> Model:
        return self.runtime.model

    @property
    def decoder(self) -> Decoder:
        return self.runtime.decoder

    @property
    def weights(self) -> Weights:
        return self.runtime.weights

    @property
    def mesh(self) -> Mesh:
        return self.runtime.mesh

    @property
    def schedule(self) -> str:
        return self.runtime.settings.schedule

    @property
    def prefill_chunk(self) -> int | None:
        return self.runtime.prefill_chunk

    def encode(self, prompt: Prompt, *, first: bool = True) -> list[int]:
        """Token numbers of a prompt, see `encoding.encode`."""
        return encode(self.model, prompt, first=first)

    def encode_with_prefix(self, prefix: Prompt, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Token numbers of prompts that all follow one prefix, see `encoding`."""
        return encode_with_prefix(self.model, prefix, prompts)

    def prefix_tokens(self, prefix: Prompt) -> int:
        """How many tokens a prefix gives every prompt that follows it."""
        return prefix_tokens(self.model, prefix)

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sampling | None = None,
        batch: int | None = None,
        notify: Notify | None = None,
        prefix: int = 0,
        fit: bool = False,
    ) -> Run:
        """Process prompts, given as token numbers, and draw their first tokens.

        Args:
            batch: most prompts at once; the others are begun when one of them ends. By default
                all.
            notify: called with the tokens read of the longest prompt, and all of them, when a chunk
                of it is done; not for a prompt that is read in one piece.
            prefix: so many tokens, which all prompts begin with, are read once and stored once,
                see `prefix`. The result is that of prompts read in chunks, the first as long. What
                else prompts have in common is nothing to go by: it would change with the batch.
            fit: where `batch` is not given and memory is too small for all prompts at once, begin
                with as many as it has room for, and say so in a warning.

        Raises:
            InputError: if the model has too few positions, or memory is too small.
        """
        if not prompts:
            raise InputError("--prompt: give at least one prompt")
        check_range("--max-new-tokens", max_new_tokens, 1)
        if batch is not None:
            check_range("--batch", batch, 1)
        if batch is not None and self.mesh.shape["data"] > 1:
            raise InputError("--batch: not for sequences on several devices; give all prompts")
        if len(prompts) % self.mesh.shape["data"]:
            raise InputError(
                f"--prompt: {len(prompts)} prompts are not shared equally by "
                f"{self.mesh.shape['data']} devices; give a multiple"
            )
        longest = max(len(prompt) for prompt in prompts)
        limit = self.model.config.max_positions
        if longest + max_new_tokens > limit:
            raise InputError(
                f"--max-new-tokens {max_new_tokens}: a prompt of {longest} tokens leaves room for "
                f"{max(limit - longest, 0)}, for the model has {limit} positions; give fewer "
                "new tokens or a shorter prompt"
            )
        sampling = sampling or Sampling()
        given = [list(prompt) for prompt in prompts]
        fit = fit and batch is None and self.mesh.shape["data"] == 1
        run = Run(self.runtime, given, max_new_tokens, sampling, batch, prefix=prefix, fit=fit)
        run.start(notify)
        return run

    def conversation(
        self, sampling: Sampling | None = None, context: int | None = None
    ) -> "Conversation":
        """A conversation, which keeps its cache from turn to turn.

        Args:
            context: tokens that it has room for; by default 4096, or the model's positions if
                they are fewer.

        Raises:
            InputError: for a context that the model does not have, or an engine with a pool.
        """
        return Conversation(self.runtime, sampling, context)

    def resume(self, path: str | Path) -> "Conversation":
        """Go on with a conversation that was saved, with the same model and settings.

        Raises:
            InputError: if the file is damaged, or of another model or other settings.
        """
        return Conversation.resume(self.runtime, path)

    def _begin(
        self,
        prompts: Prompt | Sequence[Prompt],
        prefix: Prompt,
        max_new_tokens: int,
        sampling: Sampling | None,
        batch: int | None,
    ) -> Run:
        """`start` for text as well."""
        if sampling is not None and not isinstance(sampling, Sampling):
            raise InputError(
                f"sampling: {sampling!r} is none; give Sampling(temperature=0.7), and the number "
                "of tokens as max_new_tokens"
            )
        encoded = self.encode_with_prefix(prefix, prompt_list(prompts))
        shared = self.prefix_tokens(prefix)
        return self.start(encoded, max_new_tokens, sampling, batch, prefix=shared, fit=True)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | None = None,
        max_new_tokens: int = 64,
        *,
        ignore_eos: bool = False,
        batch: int | None = None,
        prefix: Prompt = "",
    ) -> Iterator[Step]:
        """Yield a Step per token until every sequence has ended or has `max_new_tokens`.

        Args:
            prompts: text or token numbers of each; a single one may be given as it is.
            batch: most sequences decoded together, see `start`; by default as many as fit.
            prefix: what comes before every prompt, text if they are text; read and stored once.
        """
        run = self._begin(prompts, prefix, max_new_tokens, sampling, batch)
        for tokens in run.tokens(ignore_eos=ignore_eos):
            yield Step(tokens, run.push_text(tokens))
        tail = run.finish_text()
        if any(tail):
            yield Step([None] * len(tail), tail)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | None = None,
        max_new_tokens: int = 64,
        *,
        ignore_eos: bool = False,
        batch: int | None = None,
        prefix: Prompt = "",
    ) -> Generation:
        """The whole result, in the prompts' order; arguments as for `stream`."""
        run = self._begin(prompts, prefix, max_new_tokens, sampling, batch)
        for tokens in run.tokens(ignore_eos=ignore_eos):
            run.push_text(tokens)
        run.finish_text()
        return Generation(run.new_tokens, run.texts, run.stats())
