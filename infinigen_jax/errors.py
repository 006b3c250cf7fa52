"""The one exception that means "the input is at fault", and how a command line reports it.

The library names parameters, as in `rows`; a command line prints them as its options.
"""

import argparse
import contextlib
import difflib
import errno
import functools
import io
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import infinigen_jax

OUT_OF_MEMORY = (
    "out of memory: lower the length of the prompts, `max_new_tokens`, `batch`, `context` of a "
    "conversation, `dense_layers`, `hot_set` or `prefill_chunk`, or use `rows` int8, "
    "`pool.tokens`, `weight_dtype` int8 or int4, `weights` host or a smaller model; "
    "`python -m infinigen_jax.plan` shows what takes how much"
)
TERMINATED, HUNG_UP = 128 + signal.SIGTERM, 128 + signal.SIGHUP  # exit statuses
NO_THREAD = "can't start new thread"
LONGEST = 1000  # characters of a message
SHOWN = 60  # characters of a refused value
EXTENSIONS: set[str] = set()  # files of policies from outside: their faults are bad input
# Options that are not named like the parameter of the library that they set.
OPTIONS = {"prompts": "--prompt", "pool": "--pool-tokens", "prefix_bytes": "--prefix-cache-gib"}


def one_line(message: str) -> str:
    """Return a message, which may repeat anything, as one printable line of limited length."""
    words = " ".join(message.split())
    if len(words) > LONGEST:
        words = f"{words[: LONGEST * 2 // 3]} ... {words[-LONGEST // 3 :]}"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in words)


def shortened(value: object) -> str:
    """Return the text of a value for a message, without its end if too long."""
    text = str(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


class InputError(ValueError):
    """Bad input: a file, a parameter or a combination of them that cannot be served.

    The message is a single line that names the file or the parameter and a remedy; a
    remedy names other parameters in backticks. Command lines print it and end with exit status 2.
    """

    def __init__(self, message: str):
        super().__init__(one_line(message))

    def message(self, options: Mapping[str, str]) -> str:
        """Return the message with parameters as options of a command line, given by parameter."""
        return with_options(str(self), options)


class ParameterError(InputError):
    """A parameter, named as in the library (`pool.tokens`), whose value cannot be served."""

    def __init__(self, parameter: str, problem: str, value: Any = None):
        self.parameter = parameter
        shown = value if isinstance(value, Path) else shortened(value)
        self.problem = problem if value is None else f"{shown}: {problem}"
        super().__init__(f"{parameter}{': ' if value is None else ' '}{self.problem}")

    def message(self, options: Mapping[str, str]) -> str:
        name = str(self).removeprefix(self.parameter)
        return options.get(self.parameter, self.parameter) + with_options(name, options)


def with_options(message: str, options: Mapping[str, str]) -> str:
    """Return a message with parameters in backticks replaced by their options, if any."""
    return re.sub(r"`([a-z_.]+)`", lambda match: options.get(match[1], match[0]), message)


class MemoryShortageError(InputError):
    """Model or generation that does not fit in memory; refused before anything is allocated."""


class UnsupportedModelError(InputError):
    """Model configuration that this package refuses; the message names the offending setting."""


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *arguments: Any) -> None:
        print(parser.format_help(), end="")
        parser.exit()


class Parser(argparse.ArgumentParser):
    """Parser whose errors are one line on stderr, like all errors of a command line.

    Options of the group `experts` are shown only by --help-all, which comes with them.
    """

    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(*arguments, **settings)
        version = f"infinigen_jax {infinigen_jax.__version__}"
        self.add_argument("--version", action="version", version=version, help="show the version")

    @functools.cached_property
    def experts(self) -> Any:
        """Group of options that few users need."""
        self.add_argument(
            "--help-all",
            action=_HelpAll,
            nargs=0,
            default=argparse.SUPPRESS,
            help="show the expert options too",
        )
        return self.add_argument_group("expert options")

    @property
    def options(self) -> dict[str, str]:
        """Options by the library's name of the parameter that they set."""
        options = {}
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    options |= parser.options
            for name in (name for name in action.option_strings[:1] if name.startswith("--")):
                options[action.dest] = options[action.dest.replace("pool_", "pool.")] = name
        known = options.values()
        return options | {n: option for n, option in OPTIONS.items() if option in known}

    def print_help(self, file: Any = None) -> None:
        hidden = vars(self)["experts"]._group_actions if "experts" in vars(self) else []
        helps = [action.help for action in hidden]
        for action in hidden:
            action.help = argparse.SUPPRESS
        print(self.format_help(), end="", file=file)  # argparse ignores a failure
        for action, text in zip(hidden, helps, strict=True):
            action.help = text

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (\S+): ", r"\1 ", message)
        if unknown := re.match(r"unrecognized arguments: (--[\w-]+)", message):
            near = difflib.get_close_matches(unknown[1], self._option_string_actions, 1, 0.8)
            message += "".join(f" (did you mean {option}?)" for option in near)
        self.exit(2, f"error: {one_line(message)}; see --help\n")


def run_command(
    command: Callable[[], int | None], parser: Parser | None = None, *, program: bool = False
) -> int:
    """Run a command line, including its parser, and return its exit status.

    It is 0 on success, 2 after bad input or output that cannot be written (one line on stderr, with
    the options of `parser` in place of the library's parameters), 130 after Ctrl-C, and 141,
    quietly, after a broken stdout pipe (`... | head`). If this is the whole `program`, the process
    ends here after a signal, because the interpreter's exit crashes while XLA compiles.
    """
    # Replace streams that the caller has closed. Otherwise a file opened later would get their
    # number, and with it the output of libraries.
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # text that the terminal's encoding lacks
    before = sys.unraisablehook
    sys.unraisablehook = functools.partial(_interrupt_again, before)
    try:
        status, message = _outcome(command, parser.options if parser else {})
    finally:
        sys.unraisablehook = before
    failure = flush(sys.stdout)  # the interpreter's exit would not report a failure
    if isinstance(failure, BrokenPipeError):
        status, message = 141, ""
    elif failure is not None:
        status, message = 2, f"error: {_unwritten(failure)}"
    if message:
        with contextlib.suppress(OSError):
            print(message, file=sys.stderr)
    flush(sys.stderr)
    if program and status in (130, TERMINATED, HUNG_UP):
        os._exit(status)
    return status


def _interrupt_again(report: Callable[[Any], object], ignored: Any) -> None:
    """Repeat a signal whose exception is ignored, as in JAX's garbage-collector callback."""
    if issubclass(ignored.exc_type, KeyboardInterrupt):
        number: int = signal.SIGINT
    elif ignored.exc_type is SystemExit and ignored.exc_value.code in (TERMINATED, HUNG_UP):
        number = ignored.exc_value.code - 128
    else:
        report(ignored)
        return
    main: Any = threading.main_thread().ident

    def send() -> None:
        time.sleep(0.01)
        # An interrupt within this function would be ignored as well.
        while any(f.f_code is here for f, _ in traceback.walk_stack(sys._current_frames()[main])):
            time.sleep(0.001)
        signal.pthread_kill(main, number)

    here = _interrupt_again.__code__
    threading.Thread(target=send, daemon=True).start()


def _outcome(command: Callable[[], int | None], options: Mapping[str, str]) -> tuple[int, str]:
    """Return the exit status of a command and the line to print, empty for none."""
    try:
        return command() or 0, ""
    except SystemExit as end:  # from the parser, which has printed its message
        return end.code if isinstance(end.code, int) else 0, ""
    except InputError as error:
        message = error.message(options)
    except KeyboardInterrupt:
        return 130, "interrupted"
    except (MemoryError, RuntimeError) as error:  # XLA's own error type is a RuntimeError
        message = with_options(OUT_OF_MEMORY, options)
        if NO_THREAD in str(error):
            message = f"{NO_THREAD}: raise the limits of memory (ulimit -v) and threads (ulimit -u)"
        elif isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            message = _fault_of_extension(error)
    except BrokenPipeError:
        return 141, ""
    except OSError as error:
        message = one_line(f"{error.filename or 'system'}: {error.strerror or error}")
        if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            message = _unwritten(error)  # unbuffered; writers of files name them
        if error.errno == errno.ENOMEM:
            message = f"{message}: {with_options(OUT_OF_MEMORY, options)}"
    except Exception as error:
        message = _fault_of_extension(error)
    return 2, f"error: {one_line(message)}"


def _fault_of_extension(error: Exception) -> str:
    """Return an error with the last line of a policy from outside that led to it; else raise it.

    A variable of the environment that JAX refuses is no error of the program either.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, ValueError) and frames[-1].filename.endswith("jax/_src/config.py"):
        return f"a JAX_ variable of the environment: {error}; correct it or leave it out"
    places = [f"{f.filename}:{f.lineno}, in {f.name}" for f in frames if f.filename in EXTENSIONS]
    if not places:
        raise error
    return f"{places[-1]}: {type(error).__name__}: {error}"


def _unwritten(error: OSError) -> str:
    return f"standard output: {error.strerror or error}; write to another file"


def flush(stream: Any) -> OSError | None:
    """Flush a stream; return its error. The stream then goes nowhere: closing would fail again."""
    try:
        stream.flush()
    except OSError as error:
        with open(os.devnull, "wb") as nowhere, contextlib.suppress(OSError):
            os.dup2(nowhere.fileno(), stream.fileno())
        return error
    return None
