"""Messages of a command line to the person who waits for it, on stderr."""

import contextlib
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar

PATIENCE = 1.5  # seconds of work before it is announced
READING = "reading the prompt; a first start compiles (once; kept for the next start)"
COMPILING = "compiling the decode step (once; kept for the next start)"

Step = TypeVar("Step")


class Messages:
    """Print a line to stderr when called, unless `quiet`."""

    def __init__(self, quiet: bool = False):
        self.quiet = quiet

    def __call__(self, message: str) -> None:
        if not self.quiet:
            print(message, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def working(self, message: str) -> Iterator[None]:
        """Print a message if the block takes longer than PATIENCE.

        Short work stays silent, so that an error is the only line of a command that fails early.
        """
        timer = threading.Timer(PATIENCE, self, (f"{message} ...",))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def decoding(self, steps: Iterable[Step], first: str | None = None) -> Iterator[Step]:
        """Announce the steps of a generation that may take long.

        The second step is the first to decode, and waits for its program to be compiled.

        Args:
            first: message for the first step, if it has work to do.
        """
        iterator = iter(steps)
        for message in (first, COMPILING):
            with self.working(message) if message else contextlib.nullcontext():
                step = next(iterator, None)
            if step is None:
                return
            yield step
        yield from iterator
