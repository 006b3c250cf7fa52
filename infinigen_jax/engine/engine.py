"""The engine: prompts in, tokens and statistics out.

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
from infinigen_jax.errors import ParameterError
from infinigen_jax.loading.load import Model
from infinigen_jax.numeric import check_range
from infinigen_jax.policies import Policy
from infinigen_jax.prefill.prefill import Notify
from infinigen_jax.sampling import Sampling


class Engine:
    """Generates text with a model, a policy and a schedule.

    Args:
        model: from `load`.
        policy: policy that selects the rows to fetch, or its name; `InfiniGen()` by default.
        mesh: devices with the axes "data", which splits the sequences, and "model", which splits
            the KV heads. Each device holds its part of the cache in its host memory, and all
            weights. One device by default. The mesh does not change the results.
        settings: other fields of `EngineSettings`.

    Attributes:
        runtime: model with its settings, decoder and placed weights.

    Raises:
        InputError: for settings out of range or not supported by the model.
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
        """Return the token numbers of a prompt; see `encoding.encode`."""
        return encode(self.model, prompt, first=first)

    def encode_with_prefix(self, prefix: Prompt, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the token numbers of prompts that share a prefix; see `encoding`."""
        return encode_with_prefix(self.model, prefix, prompts)

    def prefix_tokens(self, prefix: Prompt) -> int:
        """Return the number of tokens that all prompts with a prefix share."""
        return prefix_tokens(self.model, prefix)

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | None = None,
        max_new_tokens: int = 64,
        *,
        batch: int | None = None,
        notify: Notify | None = None,
        prefix: int = 0,
        fit: bool = False,
    ) -> Run:
        """Process prompts, given as token numbers, and draw their first tokens.

        Args:
            prompts: token numbers of each prompt.
            sampling: sampling method; greedy by default.
            max_new_tokens: maximum number of new tokens per prompt.
            batch: batch size; further prompts wait until another one ends. By default all prompts
                are decoded together.
            notify: function called after each chunk of the longest prompt with the numbers of
                tokens read and to read. Not called for a prompt read in one piece.
            prefix: number of leading tokens that all prompts share, to be read and stored once;
                see `shared_prefix`. The result equals that of reading the prompts in chunks, the
                first of this length. Further common tokens are not shared, since they depend on
                the batch.
            fit: if `batch` is None and memory is too small for all prompts, reduce the batch size
                until it fits, and log a warning.

        Raises:
            InputError: if the model has too few positions or memory is too small.
        """
        if not prompts:
            raise ParameterError("prompts", "give at least one prompt")
        if sampling is not None and not isinstance(sampling, Sampling):
            raise ParameterError(
                "sampling", f"{sampling!r} is not a Sampling; give Sampling(temperature=0.7)"
            )
        check_range("max_new_tokens", max_new_tokens, 1)
        if batch is not None:
            check_range("batch", batch, 1)
        if batch is not None and self.mesh.shape["data"] > 1:
            raise ParameterError("batch", "not for sequences on several devices; leave it out")
        if len(prompts) % self.mesh.shape["data"]:
            raise ParameterError(
                "prompts",
                f"{len(prompts)} prompts are not shared equally by {self.mesh.shape['data']} "
                "devices; give a multiple",
            )
        longest = max(len(prompt) for prompt in prompts)
        limit = self.model.config.max_positions
        if longest + max_new_tokens > limit:
            raise ParameterError(
                "max_new_tokens",
                f"a prompt of {longest} tokens leaves room for {max(limit - longest, 0)}, as the "
                f"model has {limit} positions; give fewer new tokens or a shorter prompt",
                max_new_tokens,
            )
        short = self.model.config.longest_short or limit
        grown = [len(prompt) for prompt in prompts if len(prompt) <= short]
        if grown and max(grown) + max_new_tokens - 1 > short:
            raise ParameterError(
                "max_new_tokens",
                f"the model rotates the keys of texts above {short} tokens differently, and a "
                f"prompt of {max(grown)} would grow beyond; give at most "
                f"{short + 1 - max(grown)} new tokens or a longer prompt",
                max_new_tokens,
            )
        sampling = sampling or Sampling()
        sequences = [list(prompt) for prompt in prompts]
        fit = fit and batch is None and self.mesh.shape["data"] == 1
        run = Run(self.runtime, sequences, max_new_tokens, sampling, batch, prefix=prefix, fit=fit)
        run.start(notify)
        return run

    def conversation(
        self, sampling: Sampling | None = None, context: int | None = None
    ) -> "Conversation":
        """Create a conversation, which keeps its cache between turns.

        Args:
            sampling: sampling method; greedy by default.
            context: capacity in tokens; by default 4096, or the model's positions if fewer.

        Raises:
            InputError: for a context larger than the model's positions, or an engine with a pool.
        """
        return Conversation(self.runtime, sampling, context)

    def resume(self, path: str | Path) -> "Conversation":
        """Resume a saved conversation with the same model and settings.

        Raises:
            InputError: if the file is damaged or was saved with another model or other settings.
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
        """Encode prompts and start a run."""
        encoded = self.encode_with_prefix(prefix, prompt_list(prompts))
        shared = self.prefix_tokens(prefix)
        given = (sampling, max_new_tokens)
        return self.start(encoded, *given, batch=batch, prefix=shared, fit=True)

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
            prompts: text or token numbers of each prompt, or a single prompt.
            sampling: sampling method; greedy by default.
            max_new_tokens: maximum number of new tokens per prompt.
            ignore_eos: whether to continue after the end-of-sequence token.
            batch: batch size, see `start`; by default as many prompts as fit into memory.
            prefix: common beginning of all prompts, text if they are text; read and stored once.
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
        """Return the complete result, in the order of the prompts; arguments as for `stream`."""
        run = self._begin(prompts, prefix, max_new_tokens, sampling, batch)
        for tokens in run.tokens(ignore_eos=ignore_eos):
            run.push_text(tokens)
        run.finish_text()
        return Generation(run.new_tokens, run.texts, run.stats())
