"""Input lines: typed or pasted by a person, or read from a file or pipe."""

import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

from infinigen_jax.errors import InputError

PROMPT = "> "


def line_reader() -> Callable[[], str | None]:
    """Return a function that reads the next input; it returns None at the end.

    At a terminal that is not "dumb", with `prompt_toolkit`, lines can be edited and recalled, and
    pasted text with several lines, or with breaks by Alt+Enter, is one input. Elsewhere each line
    of stdin is one.
    """
    terminal = sys.stdin.isatty() and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    if terminal and importlib.util.find_spec("prompt_toolkit") is not None:
        return _editor()
    return _plain_line


def _editor() -> Callable[[], str | None]:
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
