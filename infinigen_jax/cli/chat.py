"""Chat at the terminal, `generate --chat`: answers go to stdout, everything else to stderr."""

import contextlib
import importlib.util
import os
import re
import signal
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from infinigen_jax.cli.dialogue import Dialogue
from infinigen_jax.cli.options import sampling_settings
from infinigen_jax.errors import InputError, ParameterError
from infinigen_jax.files.atomic import on_termination
from infinigen_jax.files.output import check_replaceable, checked_output
from infinigen_jax.messages import READING, Messages
from infinigen_jax.numeric import whole_number
from infinigen_jax.text.detokenize import checked_text

if TYPE_CHECKING:
    from infinigen_jax.engine.conversation import Conversation
    from infinigen_jax.engine.engine import Engine
    from infinigen_jax.settings.sampling import Sampling

CHAT_OPTIONS = ("context", "save", "resume")
# Options that make no sense in a conversation.
OTHERS = ("stats_json", "log_probs", "batch", "prefix", "prefix_file", "raw")
COMMANDS = {  # after a slash
    "help": "list the commands",
    "clear": "forget the conversation, except the system message",
    "undo": "forget the last message and its answer",
    "save FILE": "write the conversation to a file, for --resume",
    "stats": "tokens, speed and fetched rows of the last answer",
    "quit": "end, as Ctrl-D does; Ctrl-C ends an answer",
}
KEYS = "Alt+Enter breaks a line; pasted lines stay together; the arrow keys recall messages"
PROMPT = "> "


def add_chat_options(parser: ArgumentParser) -> None:
    """Add the options that `check_chat_options` and `chat` read."""
    add = parser.add_argument_group("conversation").add_argument
    add("--chat", action="store_true", help="start a conversation; each line of stdin is a turn")
    add("--system", metavar="TEXT", help="system message, for models with a chat template")
    text = "file with a Jinja template (default: the model's); plain: none, for a chat"
    add("--chat-template", metavar="F", help=text)
    text = "capacity of the chat in tokens (default 4096); the oldest turns are dropped"
    add("--context", type=whole_number(2), metavar="N", help=text)
    add("--save", metavar="F", help="write the chat to a file when it ends")
    add("--resume", metavar="F", help="resume a chat from a file")


def check_chat_options(arguments: Namespace) -> None:
    for name in OTHERS if arguments.chat else CHAT_OPTIONS:
        value = getattr(arguments, name)
        if value is not None and value is not False:
            if arguments.chat:
                raise ParameterError(name, "not with `chat`; leave one of them out")
            raise ParameterError(name, f"only with `chat`; add that, or leave `{name}` out")
    for name in ("system", "chat_template"):
        if arguments.raw and getattr(arguments, name) is not None:
            raise ParameterError("raw", f"not with `{name}`; leave one of them out")
    for name in ("system", "context"):
        if arguments.resume is not None and getattr(arguments, name) is not None:
            raise ParameterError(name, "a resumed conversation has one; leave it out")
    if arguments.system is not None:
        checked_text("system", arguments.system)
    saved = checked_output("save", arguments.save)
    if saved is not None:
        check_replaceable(saved)


def chat(
    engine: "Engine",
    arguments: Namespace,
    sampling: "Sampling",
    turns: list[str],
    say: Messages,
    options: Mapping[str, str],
) -> None:
    """Answer `turns`, then each input until it ends; then save. Errors name the `options`."""
    conversation = begin(engine, arguments, sampling, say)
    dialogue = Dialogue(conversation, arguments.chat_template, arguments.system, say)
    talk = Talk(dialogue, arguments, say, options)
    try:
        with on_termination():
            for text in turns:
                talk.answer(checked_text("prompts", text))
            talk.read()
    finally:
        failure = sys.exception()
        if arguments.save is not None:
            try:
                with on_termination(signal.SIG_IGN):
                    empty = not conversation.messages
                    say("nothing to save" if empty else dialogue.save(arguments.save))
            except InputError as error:
                if failure is None:
                    raise
                say(f"not saved: {error.message(options)}")


def begin(
    engine: "Engine", arguments: Namespace, sampling: "Sampling", say: Messages
) -> "Conversation":
    """Return a new conversation, or the one to resume."""
    if engine.model.tokenizer is None:
        raise ParameterError("chat", "this model has no tokenizer; chat with one that has")
    if arguments.resume is None:
        return engine.conversation(sampling, arguments.context)
    conversation = engine.resume(arguments.resume)
    names = ", ".join(f"`{name}`" for name in sampling_settings(arguments))
    if names and sampling != conversation.sampling:
        problem = f"it goes on with {conversation.sampling}; leave {names} out"
        raise ParameterError("resume", problem, arguments.resume)
    messages, tokens = len(conversation.messages), len(conversation.tokens)
    say(f"resumed: {messages} messages, {tokens} tokens in the cache")
    return conversation


class Talk:
    """Conversation with a person or a file of lines."""

    def __init__(
        self, dialogue: Dialogue, arguments: Namespace, say: Messages, options: Mapping[str, str]
    ):
        self._dialogue, self._arguments, self._say = dialogue, arguments, say
        self._options = options
        self._tell = Messages()  # replies to commands, also if other messages are off
        self._seconds = 0.0
        self._by_hand = sys.stdin.isatty()

    def read(self) -> None:
        """Answer inputs, and run commands, until the input ends."""
        next_input = line_reader()
        if self._by_hand:
            self._say("Type a message; /help lists the commands, Ctrl-D ends.")
        while (text := next_input()) is not None:
            if not text.strip():
                continue
            command = re.fullmatch(r"/(\w+)(?:\s+(.*))?", text.strip())
            try:
                if command is None:
                    self.answer(checked_text("stdin", text))
                elif not self.run(command[1], command[2] or ""):
                    return
            except InputError as error:
                if not self._by_hand:
                    raise
                self._tell(f"error: {error.message(self._options)}")

    def run(self, name: str, argument: str = "") -> bool:
        """Run a command; return whether the conversation continues."""
        dialogue, tell = self._dialogue, self._tell
        if name in ("quit", "exit", "bye"):
            return False
        if name == "clear":
            dialogue.clear()
            tell("[forgotten]")
        elif name == "undo":
            tell("[the last message is forgotten]" if dialogue.undo() else "[no message to undo]")
        elif name == "stats":
            tell(dialogue.summary(self._seconds))
        elif name == "save":
            path = checked_output("/save", argument or None)
            tell("/save: give the name of a file" if path is None else dialogue.save(path))
        elif name == "help":
            tell("\n".join(f"/{name:<10} {text}" for name, text in COMMANDS.items()) + f"\n{KEYS}")
        else:
            tell(f"/{name}: no such command; /help lists them")
        return True

    def answer(self, text: str) -> None:
        """Answer a message; Ctrl-C ends the answer, whose text so far is kept."""
        from infinigen_jax.engine.conversation import held_interrupts

        started, given = time.perf_counter(), self._arguments
        with held_interrupts() as interrupted:
            pieces = self._dialogue.answer(
                text, given.max_new_tokens, ignore_eos=given.ignore_eos, stop=given.stop or ()
            )
            with contextlib.closing(pieces):
                for piece in self._say.decoding(pieces, READING):
                    print(piece, end="", flush=True)
                    if interrupted.is_set():
                        break
        print(flush=True)
        self._seconds = time.perf_counter() - started
        if not self._by_hand:
            self._say(self._dialogue.summary(self._seconds))


def line_reader() -> Callable[[], str | None]:
    """Return a function that reads the next input; it returns None at the end.

    At a terminal that is not "dumb", with `prompt_toolkit`, lines can be edited and recalled, and
    pasted text with several lines, or with breaks by Alt+Enter, is one input. Elsewhere each line
    of stdin is one.
    """
    terminal = sys.stdin.isatty() and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    if not terminal or importlib.util.find_spec("prompt_toolkit") is None:
        return _plain_line
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    # Only answers go to stdout.
    session: PromptSession[str] = PromptSession(
        key_bindings=keys, output=create_output(stdout=sys.stderr), enable_open_in_editor=True
    )

    def read() -> str | None:
        warned = False
        while True:
            try:
                return session.prompt(PROMPT, prompt_continuation=". ")
            except EOFError:
                return None
            except KeyboardInterrupt:  # drops the typed text; twice on an empty line, it ends
                empty = not session.default_buffer.text
                if empty and warned:
                    return None
                if empty:
                    print("Ctrl-C again or Ctrl-D ends the conversation", file=sys.stderr)
                warned = empty

    return read


def _plain_line() -> str | None:
    """Return the next line of stdin, None at the end or after Ctrl-C."""
    if sys.stdin.isatty():
        print(PROMPT, end="", file=sys.stderr, flush=True)
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError:
        raise InputError("stdin: not UTF-8 text; convert it first") from None
    except KeyboardInterrupt:
        return None
    return line.rstrip("\r\n") if line else None
