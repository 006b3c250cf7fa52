"""Conversations: the cache is kept between turns, so that a turn reads only its new tokens.

    turn 1   | prompt | answer |
    turn 2   | cached .......  | prompt | answer |      the last token of an answer, which may not
    turn 3   | cached .........................  | ...  be cached yet, is read with the next prompt

The model sees one text, the concatenation of all turns. With the policy `full`, an answer equals
that of a prefill of this text. With other policies, earlier answers were computed from the rows
fetched at the time, which affects their cached rows. A conversation can be saved to a file and
resumed by another process, with the same continuation.
"""

import contextlib
import dataclasses
import hashlib
import signal
import threading
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from infinigen_jax.engine.encoding import Prompt, encode
from infinigen_jax.engine.generation import Run
from infinigen_jax.engine.lossless import make_run
from infinigen_jax.engine.memory_plan import Remedies, check_memory
from infinigen_jax.engine.prompts import Begun, PromptReader, capacity_for, checked_context
from infinigen_jax.engine.results import Step
from infinigen_jax.engine.runtime import Runtime
from infinigen_jax.engine.saved_file import WRONG, SavedFile, arrays, kinds, restore, write_saved
from infinigen_jax.errors import InputError, ParameterError
from infinigen_jax.loading.load import Model
from infinigen_jax.models.base import split_layers
from infinigen_jax.models.small_weights import small_dtype
from infinigen_jax.numeric import check_range
from infinigen_jax.settings.sampling import Sampling
from infinigen_jax.settings.setting import defaults_of
from infinigen_jax.text.detokenize import checked_stops


class Conversation:
    """A conversation; create it with `Engine.conversation`.

    Attributes:
        tokens: tokens of all prompts and answers so far.
        context: capacity in tokens.
        messages: the caller's record of the messages, as JSON values; saved with the conversation.
        template: the caller's name of the chat template of the messages; saved with them.
        run: `Run` of the last turn; None before the first one, and while a prompt is read.
    """

    def __init__(self, runtime: Runtime, sampling: Sampling | None, context: int | None):
        check_runtime(runtime)
        self.runtime = runtime
        self.sampling = sampling or Sampling()
        self.context = checked_context(runtime.model.config, context)
        self.tokens: list[int] = []
        self.messages: list[dict[str, str]] = []
        self.template: str | None = None
        self.run: Run | None = None
        self._begun: Begun | None = Begun()
        self._turns, self._drawn = 0, 0  # turns and resets so far; tokens drawn before this turn

    @property
    def capacity(self) -> int:
        """Capacity of the cache in tokens, `context` rounded up."""
        return capacity_for(self.runtime.decoder, self.context + self.runtime.draft_room)

    @property
    def cached(self) -> int:
        """Number of cached tokens: all tokens, possibly except the last."""
        return 0 if self._begun is None else self._begun.cached

    @property
    def unfinished(self) -> bool:
        """Whether a turn is in progress, or failed and lost the cache; `reset` ends this."""
        return self._begun is None

    def turn(
        self,
        prompt: Prompt,
        max_new_tokens: int = 64,
        *,
        ignore_eos: bool = False,
        stop: str | Sequence[str] = (),
        continues: bool | None = None,
    ) -> Generator[Step, None, None]:
        """Add a prompt, and yield the answer as `Engine.stream` does.

        The iterator may be closed early, or interrupted by Ctrl-C while it draws tokens. The answer
        then consists of the tokens so far.

        Args:
            prompt: text or token ids. Text after the first turn gets no special tokens.
            max_new_tokens: maximum number of new tokens; the end of the context also limits it.
            stop: strings that end the answer's text before them; the tokens stay in the context.
            continues: whether the answer continues the prompt's text, whose next word may begin
                with a space; by default for prompts of text.

        Raises:
            InputError: if the context has no room for the prompt and one token, or memory is too
                small for the context. The conversation does not change.
        """
        check_range("max_new_tokens", max_new_tokens, 1)
        stops = checked_stops(stop)
        if self._begun is None:
            raise InputError(
                "this conversation is in the middle of a turn, or a turn of it failed; reset it"
            )
        new = encode(self.runtime.model, prompt, further=bool(self.tokens))
        room = self.context - len(self.tokens) - len(new)
        if room < 1:
            raise ParameterError(
                "context",
                f"the conversation has {len(self.tokens)} tokens, and {len(new)} more leave no "
                "room for an answer; start one with more context",
                self.context,
            )
        begun, self._begun = self._begun, None  # its arrays are donated
        self._turns, self._drawn = self._turns + 1, begun.drawn
        before, self.run = self.run, None
        turn = self._turns
        room = min(room, max_new_tokens)
        settings = (self.runtime, [self.tokens + new], room, [self.sampling])
        try:
            options = {"begun": begun, "capacity": self.capacity, "stops": stops}
            continues = isinstance(prompt, str) if continues is None else continues
            run = make_run(*settings, **options, continues=continues)
            run.start()
        except InputError:
            if begun.cache is None:  # refused before a donation
                self._begun, self.run = begun, before
            raise
        self.run = run
        self.tokens += new
        try:
            steps = run.stream(ignore_eos=ignore_eos)
            while True:
                if turn != self._turns:
                    raise InputError("the conversation was reset during this turn; start another")
                with held_interrupts() as interrupted:
                    step = next(steps, None)
                    # The rest of a lossless round, after a stop string, has none; so has held text.
                    taken = [] if step is None else step.tokens
                    self.tokens += [token for token in taken if token is not None]
                if interrupted.is_set():
                    self._keep(run, turn)
                    raise KeyboardInterrupt
                if step is None:
                    break
                yield step
        except GeneratorExit:
            self._keep(run, turn)
            raise
        self._keep(run, turn)

    def reset(self) -> None:
        """Forget all tokens; the random stream goes on. The caller's messages are kept."""
        if self._begun is not None:
            drawn = self._begun.drawn
        else:
            drawn = self._drawn + (0 if self.run is None else len(self.run.new_tokens[0]))
        if self.run is not None:
            vars(self.run).pop("cache", None)  # makes room for the next turn's
        self._turns += 1
        self.tokens, self._begun = [], Begun(drawn=drawn)

    def save(self, path: str | Path) -> None:
        """Write the conversation to a file, whole or not at all.

        Raises:
            InputError: if the conversation is empty or within a turn, or the file cannot be
                written.
        """
        if self._begun is None:
            raise InputError(f"{path}: the conversation is in the middle of a turn; save it later")
        cache, drawn = self._begun.cache, self._begun.drawn
        if cache is None and not self.messages:
            raise InputError(f"{path}: no conversation yet; give a prompt first")
        record = {
            "model": fingerprint(self.runtime.model),
            "settings": settings_of(self.runtime),
            "sampling": dataclasses.asdict(self.sampling),
            "context": self.context,
            "cached": self.cached,
            "drawn": drawn,
            "tokens": [] if cache is None else self.tokens,
            "messages": self.messages,
            "template": self.template,
        }
        state: Any = self.runtime.decoder, cache, self.cached
        parts = ({}, ()) if cache is None else (kinds(*state), arrays(*state))
        write_saved(Path(path), record, *parts)

    @classmethod
    def resume(cls, runtime: Runtime, path: str | Path) -> "Conversation":
        """Resume a saved conversation; see `Engine.resume`."""
        check_runtime(runtime)  # first, because its errors have better remedies
        file = SavedFile(Path(path))
        record = file.record
        try:
            _check_settings(path, record, runtime)
            saved = record["sampling"]
            sampling = Sampling(**{n: type(x)(saved[n]) for n, x in defaults_of(Sampling).items()})
            context, tokens = record["context"], record["tokens"]
            cached, drawn = record["cached"], record["drawn"]
            numbers = [context, cached, drawn, *tokens]
            if not all(type(n) is int and 0 <= n < 1 << 31 for n in numbers):
                raise ValueError
            if not cached <= len(tokens) <= cached + bool(cached) or len(tokens) > context:
                raise ValueError
            conversation = cls(runtime, sampling, context)
            conversation.tokens = encode(runtime.model, tokens) if tokens else []
            conversation.messages = [
                {name: str(message[name]) for name in ("role", "content")}
                for message in record["messages"]
            ]
            conversation.template = record["template"]
        except InputError:
            raise
        except WRONG:
            raise file.refused() from None
        longest, capacity = [[0] * max(context, cached + 1)], conversation.capacity
        reader = PromptReader(runtime, longest, context, 1, capacity, 0)
        lengths = ("`context` of a new conversation",)
        remedies = Remedies(runtime.decoder, lengths, may_pool=False)
        for plan in reader.phases(1, cached, waiting=False):
            check_memory(plan, runtime.device, remedies)
        cache = restore(runtime.decoder, capacity, cached, file) if cached else None
        conversation._begun = Begun(cache, cached, drawn)
        return conversation

    def _keep(self, run: Run, turn: int) -> None:
        """Store the state of a run for the next turn, unless the conversation was reset."""
        if turn != self._turns:
            return
        run.settle()
        drawn = self._drawn + len(run.new_tokens[0])
        self._begun = Begun(run.cache, int(run.cached[0]), drawn, run.draft_length)


@contextlib.contextmanager
def held_interrupts() -> Iterator[threading.Event]:
    """Turn a first Ctrl-C into an event: an exception within a step would lose the cache.

    Handlers of the caller stay, and other threads get no signals.
    """
    event, default = threading.Event(), signal.default_int_handler
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not default:
        yield event
        return

    def interrupt(number: int, frame: object) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, default)


def check_runtime(runtime: Runtime) -> None:
    """Raise InputError for a runtime with a pool, or with data split over several devices."""
    if runtime.decoder.pool is not None:
        raise ParameterError("pool", "a conversation keeps every row; leave it out")
    if runtime.mesh.shape["data"] > 1:
        raise InputError("a conversation is one sequence; give a mesh with one device for the data")


def fingerprint(model: Model) -> str:
    """Return a hash of a model's file checksums, or of its weights if it has no files."""
    if model.fingerprint is not None:
        return model.fingerprint
    digest = hashlib.sha256(repr(model.config).encode())
    layers = split_layers(model.config, model.params["layers"])
    for leaf in jax.tree.leaves((model.params | {"layers": layers}, model.bases)):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def settings_of(runtime: Runtime) -> dict[str, str]:
    """Return the settings that a continuation depends on."""
    decoder, policy = runtime.decoder, cast(Any, runtime.decoder.policy)
    return {
        "policy": policy.name,
        **{name: str(value) for name, value in dataclasses.asdict(policy).items()},
        "dense layers": str(decoder.dense_layers),
        "rows": decoder.rows,
        "dtype": decoder.dtype.name,
        "weight dtype": small_dtype(runtime.model.params["layers"][0]) or decoder.dtype.name,
        "lossless": str(runtime.settings.lossless),
    }


def _check_settings(path: str | Path, record: dict[str, Any], runtime: Runtime) -> None:
    current, saved = settings_of(runtime), record["settings"]
    differences = [
        f"{name} {saved[name]}, not {value}"
        for name, value in current.items()
        if name in saved and saved[name] != value
    ]
    if record["model"] != fingerprint(runtime.model):
        raise InputError(f"{path}: it is with another model or conversion; load that one")
    if differences:
        raise InputError(f"{path}: saved with {'; '.join(differences)}; give the same settings")
    if current.keys() != saved.keys():
        raise InputError(f"{path}: saved by another version of this package; start a new one")
