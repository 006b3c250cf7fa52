"""Conversations of messages: the tokens that the model reads, and its answers.

The chat template renders the messages. Cached text is not rendered again: a later turn adds only
the template's text after the last answer. After `clear`, `undo`, or in a full context, the model
reads all remaining messages again. With the template "plain", for models without one, the
conversation is one text, and the user's lines are lines of it.
"""

import contextlib
import hashlib
import secrets
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinigen_jax.errors import ParameterError
from infinigen_jax.text.tokenizer import encode_further, read_template, render_chat

if TYPE_CHECKING:
    from infinigen_jax.engine.conversation import Conversation
    from infinigen_jax.engine.generation import Run

PLAIN = "plain"

Message = dict[str, str]


class Dialogue:
    """Conversation of messages.

    `template` is a file with a Jinja template, or "plain"; by default the model's. `system` is only
    for a new conversation. `say` gets a line of text when old messages are dropped.
    """

    def __init__(
        self,
        conversation: "Conversation",
        template: str | None = None,
        system: str | None = None,
        say: Callable[[str], None] = lambda message: None,
    ):
        self._conversation, self._say = conversation, say
        self._tokenizer: Any = conversation.runtime.model.tokenizer
        self._plain = template == PLAIN
        self._template = find_template(self._tokenizer, template)
        if not self._plain and self._template is None:
            raise ParameterError(
                "chat",
                "this model has no chat template; give a file with one as `chat_template`, or "
                "`chat_template` plain to have your lines continued",
            )
        name = hashlib.sha256((self._template or PLAIN).encode()).hexdigest()
        if conversation.template not in (None, name):
            problem = "the conversation began with another; give that one"
            raise ParameterError("chat_template", problem, template)
        conversation.template = name
        if system is not None:
            conversation.messages.append({"role": "system", "content": system})

    def answer(
        self, text: str, max_new_tokens: int | None = None, **options: Any
    ) -> Generator[str, None, None]:
        """Add a user's message and yield the answer piece by piece; closing the iterator ends it.

        In a full context the oldest turns are dropped first. By default an answer may fill the
        context. Further options are those of `Conversation.turn`.
        """
        conversation, said = self._conversation, self._conversation.tokens
        begins = not conversation.unfinished
        if begins and self._plain and conversation.messages and self._ended(said):
            conversation.reset()  # the end of a text is not part of a text that goes on
        most = max_new_tokens or conversation.context
        asked = [*conversation.messages, {"role": "user", "content": text}]
        asked, tokens = self._fitted(asked, min(most, conversation.context // 4))
        pieces: list[str] = []
        steps = conversation.turn(tokens, most, continues=self._plain, **options)
        try:
            with contextlib.closing(steps):
                for step in steps:
                    pieces.append(step.texts[0])
                    yield step.texts[0]
        finally:
            if pieces:
                answer = {"role": "assistant", "content": "".join(pieces)}
                conversation.messages = [*asked, answer]
            if begins and conversation.unfinished:  # it failed; the next turn reads all messages
                conversation.reset()

    def clear(self) -> None:
        """Forget all messages except the system's."""
        conversation = self._conversation
        conversation.messages = _system(conversation.messages)
        conversation.reset()

    def undo(self) -> bool:
        """Forget the last message of the user and its answer; return whether there was one."""
        conversation = self._conversation
        asked = [i for i, m in enumerate(conversation.messages) if m["role"] == "user"]
        if asked:
            conversation.messages = conversation.messages[: asked[-1]]
            conversation.reset()
        return bool(asked)

    def save(self, path: str | Path) -> str:
        """Write the conversation to a file, for `--resume`; return a line for the user."""
        self._conversation.save(path)
        return f"{len(self._conversation.messages)} messages saved to {path}"

    def summary(self, seconds: float) -> str:
        run, conversation = self._conversation.run, self._conversation
        if run is None:
            return "no answer yet"
        stats = run.stats()
        return (
            f"[{len(conversation.tokens)} of {conversation.context} tokens; {seconds:.2f} s: "
            f"{stats.prompt_tokens_read} read in {stats.prefill_seconds:.2f} s, "
            f"{stats.new_tokens} answered{rate(run, ' at ')}; fetched "
            f"{100 * stats.fetched_fraction:.1f} % of the cached rows]"
        )

    def render(self, messages: list[Message]) -> list[int]:
        """Return the tokens that the messages add to the conversation."""
        said = self._conversation.tokens
        text = self._text(messages, fresh=not said)
        if self._ended(said):
            # The template may put the answer's last token after it, maybe after a space. That token
            # may take a space after it, so both are encoded together.
            tokens = self._encode(text.lstrip(), fresh=False)
            if tokens[:1] == said[-1:]:
                return tokens[1:]
        return self._encode(text, fresh=not said)

    def _fitted(self, messages: list[Message], room: int) -> tuple[list[Message], list[int]]:
        """Drop the oldest turns if they leave no room for an answer; return messages and tokens.

        Half of the turns are dropped at a time, because the rest must be read again.
        """
        conversation, system = self._conversation, _system(messages)
        turns, tokens = messages[len(system) :], self.render(messages)
        kept = tokens
        size = len(conversation.tokens) + len(tokens)
        while size + room > conversation.context:
            begins = [i for i, m in enumerate(turns) if m["role"] == "user"]
            if len(begins) < 2:
                break
            turns = turns[begins[(len(begins) + 1) // 2] :]
            kept = self._encode(self._text([*system, *turns], fresh=True), fresh=True)
            size = len(kept)
        dropped = len(messages) - len(system) - len(turns)
        if not dropped or size >= conversation.context:  # the last message alone is too long
            return messages, tokens
        conversation.reset()
        self._say(f"[the context is full: the oldest {dropped} messages are dropped]")
        return [*system, *turns], kept

    def _ended(self, tokens: list[int]) -> bool:
        """Return whether the last token ends a text or a turn."""
        return bool(tokens) and tokens[-1] in self._conversation.runtime.model.eos_ids

    def _encode(self, text: str, *, fresh: bool) -> list[int]:
        if fresh:
            return self._tokenizer.encode(text, add_special_tokens=self._plain)
        return encode_further(self._tokenizer, text)

    def _text(self, messages: list[Message], *, fresh: bool) -> str:
        """Return the text after the last answer; all of it if nothing is cached."""
        answers = [i + 1 for i, m in enumerate(messages) if m["role"] == "assistant"]
        answered = answers[-1] if answers else 0
        if self._plain:
            new = messages if fresh else messages[answered:]
            lines = (("" if m["role"] == "assistant" else "\n") + m["content"] for m in new)
            text = "".join(lines)
            return text.removeprefix("\n") if fresh else text
        if fresh or not answered:
            return self._rendered(messages)
        # A template may alter an answer's text; a mark shows where it ends.
        mark = secrets.token_hex(16)
        marked = {"role": "assistant", "content": mark}
        text = self._rendered([*messages[: answered - 1], marked, *messages[answered:]])
        return text.rpartition(mark)[2]

    def _rendered(self, messages: list[Message]) -> str:
        assert self._template is not None
        return render_chat(self._template, messages, self._tokenizer.special_tokens)


def find_template(tokenizer: Any, name: str | None) -> str | None:
    """Return the chat template of a file, by default the model's; None for none."""
    if name == PLAIN:
        return None
    return tokenizer.chat_template if name is None else read_template(name)


def rate(run: "Run", before: str = ", ") -> str:
    """Return the decoding speed after the first step, which may compile; empty without any."""
    stats = run.stats()
    if run.clock.steps <= 2 or not stats.decode_seconds:
        return ""
    return f"{before}{stats.decode_tokens_per_second:.1f} tokens/s"


def _system(messages: list[Message]) -> list[Message]:
    """Return the messages before the first turn."""
    return [message for message in messages[:1] if message["role"] == "system"]
