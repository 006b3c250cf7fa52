"""Messages of a command line to the person who waits for it, on stderr."""

import contextlib
import itertools
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar

PATIENCE = 1.5  # seconds of work before it is announced
READING = "reading the prompt; a first start compiles"
COMPILING = "preparing the decode step; a first start compiles"
KEPT = "once; kept for the next start"

Step = TypeVar("Step")


class Messages:
    """Printer of lines to stderr, silent if `quiet`.

    Attributes:
        kept: whether compiled programs are stored.
    """

    def __init__(self, quiet: bool = False):
        self.quiet, self.kept = quiet, False

    def __call__(self, message: str) -> None:
        if not self.quiet:
            with contextlib.suppress(OSError):  # a full disk ends no run
                print(message, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def working(self, message: str) -> Iterator[None]:
        """Print a message if the block takes longer than PATIENCE; fast failures stay one line."""
        if self.kept and message in (READING, COMPILING):
            message = f"{message} ({KEPT})"
        timer = threading.Timer(PATIENCE, self, (f"{message} ...",))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def decoding(self, steps: Iterable[Step], first: str | None = None) -> Iterator[Step]:
        """Yield a generation's steps; announce slow ones. The second compiles the decode step."""
        iterator, ready = iter(steps), []
        # At a terminal the text of the first step waits, so that no message interrupts its line.
        terminal = not self.quiet and sys.stdout.isatty() and sys.stderr.isatty()
        for message in (first, COMPILING):
            with self.working(message) if message else contextlib.nullcontext():
                ready += itertools.islice(iterator, 1)
            if not terminal or message == COMPILING:
                yield from ready
                ready = []
        yield from iterator


def format_bytes(count: int) -> str:
    """Format a byte count: `1536` becomes "1.5 KiB"."""
    if abs(count) < 1024:
        return f"{count} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if abs(value) < 1023.95:  # larger values would round to 1024.0
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} PiB"
