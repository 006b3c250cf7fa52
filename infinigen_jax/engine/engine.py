"""The engine: prompts in, tokens and statistics out."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from infinigen_jax.decode.layer import Decoder
from infinigen_jax.engine.conversation import Conversation
from infinigen_jax.engine.encoding import UNSETTLED, Prompt, as_list, encode, prompt_list
from infinigen_jax.engine.generation import Run
from infinigen_jax.engine.lossless import make_run
from infinigen_jax.engine.results import Generation, Step
from infinigen_jax.engine.runtime import make_runtime
from infinigen_jax.engine.settings import EngineSettings
from infinigen_jax.errors import InputError, ParameterError
from infinigen_jax.loading.load import Model
from infinigen_jax.numeric import check_range
from infinigen_jax.policies import Policy
from infinigen_jax.prefill.prefill import Notify
from infinigen_jax.settings.sampling import MOST_LOG_PROBS, Sampling
from infinigen_jax.text.detokenize import checked_stops, checked_text
from infinigen_jax.text.tokenizer import render_chat


def samplings(given: Sampling | Sequence[Sampling] | None, prompts: int) -> list[Sampling]:
    """Return the settings of each prompt; raise InputError for a wrong type or number."""
    if given is None or isinstance(given, Sampling):
        return [given or Sampling()] * prompts
    if not isinstance(given, Sequence) or not all(isinstance(s, Sampling) for s in given):
        raise ParameterError(
            "sampling", f"{given!r} is not a Sampling; give Sampling(temperature=0.7)"
        )
    if len(given) != prompts:
        raise ParameterError("sampling", f"{len(given)} for {prompts} prompts; give one each")
    return list(given)


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

    def encode(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a prompt.

        Args:
            add_special_tokens: whether text gets those that begin one. Not the text of a chat
                template, which writes its own.

        Raises:
            InputError: for an empty prompt, or a token that is no number of the vocabulary.
        """
        return encode(self.model, prompt, add_special_tokens=add_special_tokens)

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Return the token ids of a chat, with a prompt for the next answer.

        Args:
            messages: "role" and "content" of each, for the model's chat template.

        Raises:
            InputError: if the model has no template, or its template refuses the messages.
        """
        tokenizer = self.model.tokenizer
        if tokenizer is None or tokenizer.chat_template is None:
            raise InputError("this model has no chat template; give prompts as text")
        text = render_chat(tokenizer.chat_template, messages, tokenizer.special_tokens)
        return self.encode(text, add_special_tokens=False)

    def encode_with_prefix(self, prefix: Prompt, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the token ids of prompts that share a prefix; text is tokenised as a whole.

        Raises:
            InputError: if `encode` raises it, or if text and token ids are mixed.
        """
        given: Any = [as_list(prefix), *prompts]
        if isinstance(prefix, str):
            checked_text("prefix", prefix)
        elif not isinstance(given[0], list):
            raise ParameterError("prefix", "give text or a list of token ids", prefix)
        if not len(prefix):
            return [self.encode(prompt) for prompt in given[1:]]
        if len({isinstance(each, str) for each in given}) > 1:
            why = "give it like the prompts, as text or as token ids"
            raise ParameterError("prefix", why)
        if isinstance(prefix, str):
            return [self.encode(prefix + prompt) for prompt in given[1:]]
        return [self.encode([*prefix, *prompt]) for prompt in given[1:]]

    def prefix_tokens(self, prefix: Prompt, *, add_special_tokens: bool = True) -> int:
        """Return the number of tokens that all prompts with a prefix share.

        The last tokens of a text prefix are excluded: appended text may change their tokenisation.
        For `add_special_tokens` see `encode`.
        """
        if not isinstance(prefix, str):
            return len(prefix)
        if not prefix:
            return 0
        tokens = self.encode(prefix, add_special_tokens=add_special_tokens)
        return max(0, len(tokens) - UNSETTLED)

    def start(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        max_new_tokens: int = 64,
        *,
        batch: int | None = None,
        notify: Notify | None = None,
        prefix: int = 0,
        fit: bool = False,
        log_probs: int | None = None,
        stop: str | Sequence[str] = (),
        continues: bool = False,
    ) -> Run:
        """Process prompts and draw their first tokens.

        Args:
            prompts: text or token ids of each prompt, or a single prompt.
            sampling: settings, also one for each prompt; greedy by default. Equal prompts draw
                differently.
            max_new_tokens: maximum number of new tokens per prompt.
            batch: batch size; further prompts wait until another one ends. By default all prompts
                are decoded together.
            notify: function called after each chunk of the longest prompt with the number of
                tokens read and their total. Not called for a prompt read in one piece.
            prefix: number of leading tokens that all prompts share, to be read and stored once;
                see `engine.prompts`. The result equals that of reading the prompts in chunks, the
                first of this length. Further common tokens are not shared, as they depend on
                the batch.
            fit: if `batch` is None and memory is too small for all prompts, reduce the batch size
                until it fits, and log a warning.
            log_probs: number of likeliest tokens whose log-probabilities are returned with those of
                each drawn token, at most 20; None for no log-probabilities.
            stop: strings that end a text before them; see `Run.stream`.
            continues: whether each text continues its prompt, with the space before its first word;
                otherwise it begins anew, as an answer does.

        Raises:
            InputError: for an invalid argument, too few positions or too little memory.
        """
        encoded = [encode(self.model, prompt) for prompt in prompt_list(prompts)]
        if not encoded:
            raise ParameterError("prompts", "give at least one prompt")
        check_range("prefix", prefix, 0)
        check_range("max_new_tokens", max_new_tokens, 1)
        if batch is not None:
            check_range("batch", batch, 1)
        devices = self.runtime.mesh.shape["data"]
        if batch is not None and devices > 1:
            raise ParameterError("batch", "not for sequences on several devices; leave it out")
        if len(encoded) % devices:
            raise ParameterError(
                "prompts",
                f"{len(encoded)} prompts are not shared equally by {devices} devices; give a "
                "multiple",
            )
        self._check_lengths(encoded, max_new_tokens)
        if log_probs is not None:
            check_range("log_probs", log_probs, 0, MOST_LOG_PROBS)
        settings = samplings(sampling, len(encoded))
        fit = fit and batch is None and devices == 1
        options: Any = {"batch": batch, "prefix": prefix, "fit": fit, "log_probs": log_probs}
        options |= {"stops": checked_stops(stop), "continues": continues}
        run = make_run(self.runtime, encoded, max_new_tokens, settings, **options)
        run.start(notify)
        return run

    def _check_lengths(self, prompts: list[list[int]], max_new_tokens: int) -> None:
        """Raise InputError for texts that the model has no positions for."""
        longest = max(map(len, prompts))
        limit = self.model.config.max_positions
        if longest >= limit:
            index = next(i for i, prompt in enumerate(prompts, 1) if len(prompt) == longest)
            which = "the prompt" if len(prompts) == 1 else f"prompt {index} of {len(prompts)}"
            raise InputError(
                f"{which} has {longest} tokens, which is too long: the model has {limit} positions "
                "for prompt and new tokens; shorten the prompt"
            )
        if longest + max_new_tokens > limit:
            raise ParameterError(
                "max_new_tokens",
                f"a prompt of {longest} tokens leaves room for {limit - longest}, as the "
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

    def conversation(
        self, sampling: Sampling | None = None, context: int | None = None
    ) -> "Conversation":
        """Create a conversation, which keeps its cache between turns.

        Args:
            sampling: sampling method; greedy by default.
            context: capacity in tokens, at least 2; by default 4096, or fewer if the model has
                fewer positions or rotates long texts differently.

        Raises:
            InputError: for a context that the model does not allow, an engine with a pool, or
                sequences on several devices.
        """
        return Conversation(self.runtime, samplings(sampling, 1)[0], context)

    def resume(self, path: str | Path) -> "Conversation":
        """Resume a saved conversation with the same model and settings.

        Raises:
            InputError: if the file is damaged or was saved with another model or other settings, or
                if memory is too small.
        """
        return Conversation.resume(self.runtime, path)

    def _begin(self, prompts: Any, prefix: Prompt, *arguments: Any, **options: Any) -> Run:
        given = prompt_list(prompts)
        encoded = self.encode_with_prefix(prefix, given)
        options["continues"] = all(isinstance(prompt, str) for prompt in given)
        options |= {"fit": True, "prefix": self.prefix_tokens(prefix)}
        return self.start(encoded, *arguments, **options)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        max_new_tokens: int = 64,
        *,
        ignore_eos: bool = False,
        batch: int | None = None,
        prefix: Prompt = "",
        log_probs: int | None = None,
        stop: str | Sequence[str] = (),
    ) -> Iterator[Step]:
        """Yield a Step per token until every sequence has ended or has `max_new_tokens`.

        Args:
            prompts: text or token ids of each prompt, or a single prompt. Texts are continued.
            sampling: settings, also one for each prompt; greedy by default.
            max_new_tokens: maximum number of new tokens per prompt.
            ignore_eos: whether to continue after the end-of-sequence token.
            batch: batch size, see `start`; by default as many prompts as fit into memory.
            prefix: common beginning of all prompts, text if they are text; read and stored once.
            log_probs, stop: see `start`.
        """
        given: Any = {"batch": batch, "log_probs": log_probs, "stop": stop}
        run = self._begin(prompts, prefix, sampling, max_new_tokens, **given)
        yield from run.stream(ignore_eos=ignore_eos)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        max_new_tokens: int = 64,
        *,
        ignore_eos: bool = False,
        batch: int | None = None,
        prefix: Prompt = "",
        log_probs: int | None = None,
        stop: str | Sequence[str] = (),
    ) -> Generation:
        """Return the complete result, in the order of the prompts; arguments as for `stream`."""
        given: Any = {"batch": batch, "log_probs": log_probs, "stop": stop}
        run = self._begin(prompts, prefix, sampling, max_new_tokens, **given)
        for _ in run.stream(ignore_eos=ignore_eos):
            pass
        return Generation(run.new_tokens, run.texts, run.stats(), run.log_probs)
