"""Chatting at the terminal, `generate --chat`: a line of stdin is a turn, answers go to stdout.

The chat template renders the messages. Cached text is never rendered again: a later turn adds only
the template's text after the last answer. The template "plain" is for models without one: the
conversation is one running text, and the user's lines are lines of it.
"""

import argparse
import contextlib
import secrets
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinigen_jax.cli.options import sampling_settings
from infinigen_jax.engine.saved_file import check_replaceable
from infinigen_jax.errors import InputError
from infinigen_jax.files.output import checked_output
from infinigen_jax.messages import READING, Messages
from infinigen_jax.numeric import whole_number
from infinigen_jax.text.detokenize import checked_text
from infinigen_jax.text.templates import render_chat

if TYPE_CHECKING:
    from infinigen_jax.engine.conversation import Conversation
    from infinigen_jax.engine.engine import Engine
    from infinigen_jax.engine.generation import Run
    from infinigen_jax.sampling import Sampling

PLAIN = "plain"
OWN_OPTIONS = ("system", "chat_template", "context", "save", "resume")
OTHERS = ("stats_json", "batch", "prefix", "prefix_file")  # make no sense in a conversation


def add_chat_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `check_chat_options` and `chat` read."""
    add = parser.add_argument_group("conversation").add_argument
    add("--chat", action="store_true", help="a conversation: each line of stdin is a turn")
    add("--system", metavar="TEXT", help="system message of the chat")
    add(
        "--chat-template",
        metavar="F",
        help="file with a Jinja template for the chat (default: the model's), or plain",
    )
    add(
        "--context",
        type=whole_number(2),
        metavar="N",
        help="tokens that the chat has room for (default 4096); 128k is 131072",
    )
    add("--save", metavar="F", help="write the chat to a file when it ends")
    add("--resume", metavar="F", help="go on with a chat from a file")


def check_chat_options(arguments: argparse.Namespace) -> None:
    """Refuse combinations that make no sense.

    Raises:
        InputError: naming the option.
    """
    for name in OTHERS if arguments.chat else OWN_OPTIONS:
        if getattr(arguments, name) is not None:
            option = f"--{name.replace('_', '-')}"
            if arguments.chat:
                raise InputError(f"{option}: not with --chat; leave one of them out")
            raise InputError(f"{option}: only with --chat; add that, or leave {option} out")
    for name in ("system", "context"):
        if arguments.resume is not None and getattr(arguments, name) is not None:
            raise InputError(f"--{name}: a resumed conversation has one; leave it out")
    if arguments.system is not None:
        checked_text("system", arguments.system)
    saved = checked_output("save", arguments.save)
    if saved is not None:
        check_replaceable(saved)


def chat(
    engine: "Engine",
    arguments: argparse.Namespace,
    sampling: "Sampling",
    turns: list[str],
    say: Messages,
) -> None:
    """Answer `turns`, then each line of stdin until it ends; then save.

    Raises:
        InputError: when a turn does not fit; the conversation is saved before.
    """
    conversation = begin(engine, arguments, sampling, say)
    talk = Chat(conversation, arguments.chat_template, arguments.system)
    refusal = None
    try:
        for text in _lines(turns):
            _take_turn(talk, text, arguments, say)
    except InputError as error:
        refusal = error
    if arguments.save is not None and conversation.cached:
        conversation.save(arguments.save)
        say(f"{len(conversation.tokens)} tokens saved to {arguments.save}")
    if refusal is not None:
        raise refusal


def begin(
    engine: "Engine", arguments: argparse.Namespace, sampling: "Sampling", say: Messages
) -> "Conversation":
    """A new conversation, or the one to resume."""
    if engine.model.tokenizer is None:
        raise InputError("--chat: this model has no tokenizer; chat with one that has")
    if arguments.resume is None:
        return engine.conversation(sampling, arguments.context)
    conversation = engine.resume(arguments.resume)
    if sampling_settings(arguments) and sampling != conversation.sampling:
        raise InputError(
            f"--resume {arguments.resume}: it goes on with {conversation.sampling}; leave "
            "--temperature, --top-k, --top-p and --seed out"
        )
    say(f"resumed after {len(conversation.tokens)} tokens")
    return conversation


def _take_turn(talk: "Chat", text: str, arguments: argparse.Namespace, say: Messages) -> None:
    """Answer a line; Ctrl-C ends the answer, and what is said of it so far stays said."""
    started = time.perf_counter()
    with interrupts() as interrupted:
        answer = talk.answer(text, arguments.max_new_tokens, arguments.ignore_eos)
        with contextlib.closing(answer):
            for piece in say.decoding(answer, READING):
                sys.stdout.write(piece)
                sys.stdout.flush()
                if interrupted.is_set():
                    break
    sys.stdout.write("\n")
    sys.stdout.flush()
    say(talk.summary(time.perf_counter() - started))


class Chat:
    """A conversation of messages.

    Args:
        template: a file with a Jinja template, or "plain"; by default the model's own.
        system: the system message; only before the first turn.

    Raises:
        InputError: if the model has no template, or there is no such file.
    """

    def __init__(
        self, conversation: "Conversation", template: str | None = None, system: str | None = None
    ):
        self._conversation = conversation
        self._tokenizer: Any = conversation.runtime.model.tokenizer
        self._plain = template == PLAIN
        own = getattr(self._tokenizer, "chat_template", None)
        self._template = own if template in (None, PLAIN) else _read_template(template)
        if not self._plain and not self._template:
            raise InputError(
                "--chat: this model has no chat template; give a file with one as --chat-template, "
                "or --chat-template plain to have your lines continued"
            )
        if system is not None:
            conversation.messages.append({"role": "system", "content": system})

    def answer(
        self, text: str, max_new_tokens: int = 64, ignore_eos: bool = False
    ) -> Generator[str, None, None]:
        """Say something; yields the answer piece by piece. Closing the iterator ends the answer."""
        conversation = self._conversation
        asked = [*conversation.messages, {"role": "user", "content": text}]
        pieces: list[str] = []
        steps = conversation.turn(self.render(asked), max_new_tokens, ignore_eos=ignore_eos)
        try:
            with contextlib.closing(steps):
                for step in steps:
                    pieces.append(step.texts[0])
                    yield step.texts[0]
        finally:
            if pieces:
                answer = {"role": "assistant", "content": "".join(pieces)}
                conversation.messages = [*asked, answer]

    def render(self, messages: list[dict[str, str]]) -> list[int]:
        """The tokens that the last message adds to what was said."""
        said = self._conversation.tokens
        text = self._plain_text(messages) if self._plain else self._templated(messages)
        if said and said[-1] in self._conversation.runtime.model.config.eos_ids:
            # The answer ended with the token that the template puts after it.
            text = text.removeprefix(self._tokenizer.decode(said[-1:]))
        special = self._plain and not said
        return self._tokenizer.encode(text, add_special_tokens=special)

    def summary(self, seconds: float) -> str:
        """A line for a person about the last turn."""
        run, conversation = self._conversation.run, self._conversation
        assert run is not None
        stats = run.stats()
        line = (
            f"[{len(conversation.tokens)} of {conversation.context} tokens; {seconds:.2f} s: "
            f"{run.tokens_read} read in {stats.prefill_seconds:.2f} s, {stats.new_tokens} answered"
            f"{rate(run, ' at ')}; fetched "
            f"{100 * stats.fetched_fraction:.1f} % of the cached rows]"
        )
        full = len(conversation.tokens) >= conversation.context
        return line + (" the context is full" if full else "")

    def _plain_text(self, messages: list[dict[str, str]]) -> str:
        new = [message["content"] for message in messages[_answered(messages) :]]
        return "\n".join(["", *new] if self._conversation.tokens else new)

    def _templated(self, messages: list[dict[str, str]]) -> str:
        """The template's text after the last answer; all of it if there is none."""
        answered = _answered(messages)
        if not answered:
            return self._rendered(messages)
        # A template may alter an answer's text; a mark shows where it ends.
        mark = secrets.token_hex(16)
        marked = {"role": "assistant", "content": mark}
        text = self._rendered([*messages[: answered - 1], marked, *messages[answered:]])
        return text.rpartition(mark)[2]

    def _rendered(self, messages: list[dict[str, str]]) -> str:
        assert self._template is not None
        special = getattr(self._tokenizer, "special_tokens", {})
        return render_chat(self._template, messages, special)


def rate(run: "Run", before: str = ", ") -> str:
    """The speed of decoding, after the first step, which may compile; empty if it is the only one.

    Args:
        before: text between what comes first and the number.
    """
    stats = run.stats()
    if max(map(len, run.new_tokens)) <= 2 or not stats.decode_seconds:
        return ""
    return f"{before}{stats.decode_tokens_per_second:.1f} tokens/s"


def _answered(messages: list[dict[str, str]]) -> int:
    """How many messages there are up to the last answer."""
    roles = [message["role"] for message in messages]
    return len(roles) - roles[::-1].index("assistant") if "assistant" in roles else 0


def _read_template(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InputError(f"--chat-template {name}: {reason}; give a file, or plain") from None


def _lines(turns: list[str]) -> Iterator[str]:
    """The turns to answer. Ctrl-C while one is waited for ends them, as the end of stdin does."""
    for text in turns:
        yield checked_text("prompts", text)
    while True:
        if sys.stdin.isatty():
            sys.stderr.write("> ")
            sys.stderr.flush()
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError:
            raise InputError("stdin: not UTF-8 text; convert it first") from None
        except KeyboardInterrupt:
            line = ""
        if not line:
            return
        if line.strip():
            yield checked_text("stdin", line.rstrip("\r\n"))


@contextlib.contextmanager
def interrupts() -> Iterator[threading.Event]:
    """The first Ctrl-C sets the event, a second one ends the program.

    In the middle of a step an exception would leave the cache undefined.
    """
    event = threading.Event()

    def interrupt(number: int, frame: object) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
