"""Conversations: the cache is kept between turns, so that a turn reads its new tokens only.

    turn 1   | prompt | answer |
    turn 2   | cached .......  | prompt | answer |      the last token of an answer, which may not
    turn 3   | cached .........................  | ...  be cached yet, is read with the next prompt

What the model gets is one text, all that was said so far. With the policy `full` an answer is what
a prefill of that text would give; with others, what was answered before was computed with the rows
that were fetched then. A conversation can be saved to a file and resumed by another process, and
goes on there exactly as it would have here.
"""

import dataclasses
import hashlib
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from infinigen_jax.checkpoint.manifest import read_manifest
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.engine.encoding import Prompt, encode
from infinigen_jax.engine.generation import Run
from infinigen_jax.engine.memory_plan import check_memory, plan_memory
from infinigen_jax.engine.prompts import Begun, round_up_capacity
from infinigen_jax.engine.remedies import Remedies
from infinigen_jax.engine.results import Step
from infinigen_jax.engine.runtime import Runtime
from infinigen_jax.engine.saved_file import SavedFile, write_saved
from infinigen_jax.engine.snapshot import arrays, layout, restore
from infinigen_jax.errors import InputError
from infinigen_jax.loading.load import Model
from infinigen_jax.models.joined import split
from infinigen_jax.numeric import check_range
from infinigen_jax.prefill.prefill import chunk_for
from infinigen_jax.sampling import Sampling

CONTEXT = 4096  # tokens, unless the caller says, or the model has fewer positions


class Conversation:
    """A conversation; made by `Engine.conversation`.

    Attributes:
        tokens: everything said so far, prompts and answers.
        context: tokens that it has room for.
        messages: for a caller's own record of who said what, of JSON values; saved as well.
        run: the last turn's; None before the first.
    """

    def __init__(self, runtime: Runtime, sampling: Sampling | None, context: int | None):
        check_runtime(runtime)
        most = runtime.model.config.max_positions
        if context is not None and not 1 < context <= most:
            raise InputError(f"--context {context}: give 2 to {most}, the model's positions")
        self.runtime = runtime
        self.sampling = sampling or Sampling()
        self.context = context or min(CONTEXT, most)
        self.tokens: list[int] = []
        self.messages: list[dict[str, str]] = []
        self.run: Run | None = None
        self._begun: Begun | None = Begun(None, [0])

    @property
    def capacity(self) -> int:
        """Of the cache."""
        return round_up_capacity(max(self.context, self.runtime.decoder.policy.window))

    @property
    def cached(self) -> int:
        """Tokens that the next turn need not read; all that was said but, perhaps, the last."""
        return 0 if self._begun is None else self._begun.cached[0]

    def turn(
        self, prompt: Prompt, max_new_tokens: int = 64, *, ignore_eos: bool = False
    ) -> Generator[Step, None, None]:
        """Say something, and yield the answer as `Engine.stream` does.

        The iterator may be closed before its end: what was yielded is what was answered.

        Args:
            prompt: text or token numbers. Text behind the first turn gets no special tokens.
            max_new_tokens: fewer where the context ends.

        Raises:
            InputError: if the context has no room for the prompt and a token, or memory has none
                for the context; the conversation stays as it was.
        """
        check_range("--max-new-tokens", max_new_tokens, 1)
        if self._begun is None:
            raise InputError("this conversation is in the middle of a turn, or one of it broke off")
        new = encode(self.runtime.model, prompt, first=not self.tokens)
        room = self.context - len(self.tokens) - len(new)
        if room < 1:
            raise InputError(
                f"--context {self.context}: the conversation has {len(self.tokens)} tokens, and "
                f"{len(new)} more leave no room for an answer; start one with more context"
            )
        begun, self._begun = self._begun, None  # its arrays are donated
        room = min(room, max_new_tokens)
        settings = (self.runtime, [self.tokens + new], room, self.sampling)
        try:
            run = Run(*settings, begun=begun, capacity=self.capacity)
            run.start()
        except InputError:
            if begun.cache is None:  # too little memory, say: nothing was donated
                self._begun = begun
            raise
        self.run = run
        self.tokens += new
        try:
            for tokens in run.tokens(ignore_eos=ignore_eos):
                self.tokens += run.new_tokens[0][-1:]
                yield Step(tokens, run.push_text(tokens))
            tail = run.finish_text()
            if any(tail):
                yield Step([None], tail)
        except GeneratorExit:
            self._keep(run, begun.drawn)
            raise
        self._keep(run, begun.drawn)

    def save(self, path: str | Path) -> None:
        """Write the conversation to a file, whole or not at all.

        Raises:
            InputError: if nothing was said yet, or the file cannot be written.
        """
        begun = self._begun
        if begun is None or begun.cache is None:
            raise InputError(f"--save {path}: there is no conversation yet; say something first")
        record = {
            "model": fingerprint(self.runtime.model),
            "settings": settings_of(self.runtime.decoder),
            "sampling": dataclasses.asdict(self.sampling),
            "context": self.context,
            "cached": self.cached,
            "drawn": begun.drawn,
            "tokens": self.tokens,
            "messages": self.messages,
        }
        kept = self.runtime.decoder, begun.cache, self.cached
        write_saved(Path(path), record, layout(*kept), arrays(*kept))

    @classmethod
    def resume(cls, runtime: Runtime, path: str | Path) -> "Conversation":
        """Go on with a conversation that was saved.

        Raises:
            InputError: if the file is damaged, or of another model or other settings, or if there
                is too little memory for what it has room for.
        """
        check_runtime(runtime)
        file = SavedFile(Path(path))
        record = file.record
        with file.interpreting():
            _check_settings(f"--resume {path}", record, runtime)
            kinds = {"temperature": float, "top_k": int, "top_p": float, "seed": int}
            sampling = Sampling(**{k: kind(record["sampling"][k]) for k, kind in kinds.items()})
            context, said = record["context"], record["tokens"]
            cached, drawn = record["cached"], record["drawn"]
            checked = [context, cached, drawn, *said]
            if not all(type(n) is int and n >= 0 for n in checked):
                raise ValueError
            if not 0 < cached <= len(said) <= cached + 1 or len(said) > context:
                raise ValueError
            conversation = cls(runtime, sampling, context)
            conversation.tokens = encode(runtime.model, said)
            conversation.messages = [
                {str(name): str(text) for name, text in message.items()}
                for message in record["messages"]
            ]
        conversation._check_memory(cached)
        cache = restore(runtime.decoder, conversation.capacity, cached, file)
        conversation._begun = Begun(cache, [cached], drawn)
        return conversation

    def _check_memory(self, cached: int) -> None:
        """Refuse what would not fit, as a run does that begins with an empty cache."""
        decoder, capacity = self.runtime.decoder, self.capacity
        chunk = chunk_for(decoder, 1, self.context - cached or 1, self.runtime.prefill_chunk)
        plan = plan_memory(decoder, 1, min(chunk, capacity), capacity)
        remedies = Remedies(decoder, ("--context of a new conversation",), may_pool=False)
        check_memory(plan, self.runtime.device, remedies)

    def _keep(self, run: Run, drawn: int) -> None:
        """Go on from where a run has come to."""
        run.settle()
        drawn += len(run.new_tokens[0])
        self._begun = Begun(run.cache, [int(run.owners.cached[0])], drawn)


# Settings that older files lack, with what was done then.
LATER = {"speculate_from": "input", "tail_columns": "0"}


def check_runtime(runtime: Runtime) -> None:
    """Refuse a runtime that conversations are not for.

    Raises:
        InputError: saying why.
    """
    if runtime.decoder.pool is not None:
        raise InputError("--pool-tokens: a conversation keeps every row; leave it out")
    if runtime.mesh.shape["data"] > 1:
        raise InputError("a conversation is one sequence; give a mesh with one device for the data")


def fingerprint(model: Model) -> str:
    """Tells models apart: by their files' checksums, or the weights of a model without files."""
    if model.path is not None:
        text = json.dumps(read_manifest(model.path).files, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()
    digest = hashlib.sha256(repr(model.config).encode())
    layers = [split(layer, model.config.query_width) for layer in model.params["layers"]]
    for leaf in jax.tree.leaves((model.params | {"layers": layers}, model.bases)):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def settings_of(decoder: Decoder) -> dict[str, str]:
    """What a continuation depends on beside the model."""
    policy: Any = decoder.policy
    return {
        "policy": policy.name,
        **{name: str(value) for name, value in dataclasses.asdict(policy).items()},
        "dense layers": str(decoder.dense_layers),
        "rows": decoder.rows,
        "dtype": decoder.dtype.name,
    }


def _check_settings(where: str, record: dict[str, Any], runtime: Runtime) -> None:
    """Refuse a conversation with another model or other settings."""
    mine = settings_of(runtime.decoder)
    other = {name: value for name, value in LATER.items() if name in mine} | record["settings"]
    different = [
        f"{name} {other[name]}, not {value}"
        for name, value in mine.items()
        if name in other and other[name] != value
    ]
    if record["model"] != fingerprint(runtime.model):
        raise InputError(f"{where}: a conversation with another model; give that one as --model")
    if different:
        raise InputError(f"{where}: saved with {'; '.join(different)}; give the same settings")
    if mine.keys() != other.keys():
        raise ValueError
