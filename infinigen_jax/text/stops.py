"""Stop strings: text ends before the first of them, also if it is split between tokens."""

from collections.abc import Iterable, Sequence

from infinigen_jax.errors import ParameterError
from infinigen_jax.text.detokenize import checked_text


def checked_stops(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Return stop strings, a single one as a tuple."""
    if not isinstance(stop, Iterable) or isinstance(stop, bytes):
        raise ParameterError("stop", "give texts that end an answer", repr(stop))
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    for text in stops:
        if not isinstance(text, str) or not text:
            raise ParameterError("stop", "give a text of at least one character", repr(text))
        checked_text("stop", text)
    return stops


class StopFilter:
    """Filter that passes text on, piece by piece, until a stop string is complete.

    The end of a piece that may begin a stop string is held back. The result does not depend on how
    the text is cut into pieces. Text after a stop string is dropped.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops, self._held, self.stopped = stops, "", False

    def push(self, piece: str) -> str:
        """Append text; return the text that became final, never a part of a stop string."""
        if self.stopped:
            return ""
        text = self._held + piece
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self._held, self.stopped = "", True
            return text[: min(ends)[1]]
        final = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[final:]
        return text[:final]

    def finish(self) -> str:
        """Return the text that was held back, when no more follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of a text that begins a stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
