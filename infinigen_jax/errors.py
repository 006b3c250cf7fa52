"""The one exception that means "the input is at fault", and how a command line reports it."""

import argparse
import contextlib
import errno
import io
import os
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn

LONGEST_MESSAGE = 1000  # characters; what exceeds it is a value that was given
OUT_OF_MEMORY = (
    "out of memory: lower the length of the prompts, --max-new-tokens, --batch, --context of a "
    "conversation, --dense-layers, --hot-set or --prefill-chunk, or use --rows int8, "
    "--pool-tokens, --weights host or a smaller model; "
    "`python -m infinigen_jax.plan` shows what takes how much"
)


class InputError(ValueError):
    """Bad input: a file, an option or a combination of them that cannot be served.

    The message is a single line that names the file or the option and says what would help.
    Command lines print it and end with exit status 2.
    """


class MemoryShortageError(InputError):
    """A generation that does not fit in memory; refused before anything is allocated."""


class UnsupportedModelError(InputError):
    """A model configuration that this package refuses, by the name of the offending setting."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line on stderr, as all errors of a command line are."""

    def print_help(self, file: Any = None) -> None:
        print(self.format_help(), end="", file=file)  # argparse ignores a failure

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (\S+): ", r"\1 ", message)
        self.exit(2, f"error: {one_line(message)}; see --help\n")


def one_line(text: str) -> str:
    """Text for a terminal: no line breaks or control characters, long values shortened."""
    line = " ".join(text.split())
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    if len(line) > LONGEST_MESSAGE:
        half = LONGEST_MESSAGE // 2
        line = f"{line[:half]} ... {line[-half:]}"
    return line


def run_command(command: Callable[[], int | None]) -> int:
    """Run a command line, its parser included; turn bad input and interrupts into an exit status.

    Returns 0 on success, 2 after bad input or output that cannot be written (one line on stderr)
    and 130 after Ctrl-C. A broken stdout pipe (`... | head`) ends quietly with 141, as it does for
    other Unix programs. What is buffered is written here: the interpreter, which does it when it
    ends, would not report a failure.
    """
    open_missing_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # text that the terminal's encoding lacks
    status, message = _outcome(command)
    failure = flush(sys.stdout)
    if isinstance(failure, BrokenPipeError):
        status, message = 141, ""
    elif failure is not None:
        reason = failure.strerror or failure
        status, message = 2, f"error: standard output: {reason}; write to another file"
    if message:
        with contextlib.suppress(OSError):
            print(message, file=sys.stderr)
    flush(sys.stderr)
    return status


def _outcome(command: Callable[[], int | None]) -> tuple[int, str]:
    """The exit status of a command, and the line to print, empty for none."""
    try:
        return command() or 0, ""
    except SystemExit as end:  # of the parser, which has printed what there is to say
        return end.code if isinstance(end.code, int) else 0, ""
    except InputError as error:
        message = str(error)
    except KeyboardInterrupt:
        return 130, "interrupted"
    except MemoryError:
        message = OUT_OF_MEMORY
    except RuntimeError as error:  # XLA's own error type is one
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        message = OUT_OF_MEMORY
    except BrokenPipeError:
        return 141, ""
    except OSError as error:
        message = f"{error.filename or 'system'}: {error.strerror or error}"
        if error.errno == errno.ENOMEM:
            message = f"{message}: {OUT_OF_MEMORY}"
    return 2, f"error: {one_line(message)}"


def flush(stream: Any) -> OSError | None:
    """Write what a stream has buffered.

    Returns:
        What failed. The stream is lost then: the same text would fail again when it is closed.
    """
    try:
        stream.flush()
    except OSError as error:
        with open(os.devnull, "wb") as nowhere, contextlib.suppress(OSError):
            os.dup2(nowhere.fileno(), stream.fileno())
        return error
    return None


def open_missing_streams() -> None:
    """Streams that the caller has closed: nothing is read there, and what is printed is lost.

    No file that is opened later gets their number then, and with it what libraries print.
    """
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
