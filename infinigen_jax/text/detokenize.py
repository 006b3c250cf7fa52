"""Streaming text: from tokens, without decoding all of them for each new one, to stop strings."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from infinigen_jax.errors import InputError, ParameterError

if TYPE_CHECKING:
    from infinigen_jax.loading.load import Model

REPLACEMENT = "\ufffd"  # decoded from bytes that are not, or not yet, a character
MOST_BYTES = 4  # of a character
MOST_HELD = 8  # tokens held back


def checked_text(parameter: str, text: str) -> str:
    """Return a text; refuse lone surrogates, which stand for bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ParameterError(parameter, "not UTF-8 text; convert it first") from None
    return text


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


class TextStream:
    """Streaming text of a sequence of token ids, which continues the text of `context`.

    The concatenated pieces equal `tokenizer.decode(all_ids, skip_special_tokens=True)`, except for
    bytes that form no valid character. The cost is linear in the number of tokens.

    Tokens are decoded after the token before them, because a decoder may strip the space before the
    first word. A token may end within a character and then decodes to U+FFFD, so text that ends in
    U+FFFD is held back for the next tokens. A context that ends within a character is not used.
    """

    def __init__(self, tokenizer: Any, context: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._has_text = functools.cache(self._decides_text)
        self._pending: list[int] = []
        parts = ([*context[i:]] for i in range(len(context)))  # it may begin within a character
        whole = (part for part in parts if not self._decode(part).endswith(REPLACEMENT))
        self._context = next(whole, [])  # tokens before the pending ones; their text was returned

    def push(self, token_ids: list[int]) -> str:
        """Append tokens; return the text that became final and was not returned before."""
        return "".join(self._push(token) for token in token_ids if self._has_text(token))

    def _push(self, token: int) -> str:
        self._pending.append(token)
        text, held = self.rest(), 0
        if text.endswith(REPLACEMENT):
            if len(self._pending) < MOST_HELD:
                return ""
            held = self._unfinished(text)
            text = text[: len(text) - len(self._decode(self._pending[len(self._pending) - held :]))]
        settled = len(self._pending) - held
        self._context, self._pending = self._pending[:settled], self._pending[settled:]
        return text

    def _unfinished(self, text: str) -> int:
        """Return how many of the last pending tokens may be the beginning of a character."""
        for held in range(1, MOST_BYTES):
            context, pending, last = self._context, self._pending[:-held], self._pending[-held:]
            before = self._decode(context + pending)[len(self._decode(context)) :]
            if before + self._decode(last) == text:  # no character is cut
                return held
        return 0

    def rest(self) -> str:
        """Return the text of the pending tokens, final or not."""
        return self._decode(self._context + self._pending)[len(self._decode(self._context)) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def _decides_text(self, token: int) -> bool:
        """Return whether a token is neither special nor outside of the tokenizer's vocabulary."""
        known = self._tokenizer.convert_ids_to_tokens(token) is not None
        return known and self._decode([token, token]) != ""  # a first space may be stripped


class StopFilter:
    """Filter that passes text on, piece by piece, until a stop string is complete.

    The end of a piece that may begin a stop string is held back, so the result does not depend on
    how the text is cut into pieces. Text from the stop string on is dropped.
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


class Texts:
    """Streaming text of several sequences after their contexts; `whole` is the final text."""

    def __init__(
        self,
        model: "Model",
        sequences: int,
        stops: Sequence[str] = (),
        contexts: Sequence[Sequence[int]] = (),
    ):
        self.whole = [""] * sequences
        self._model, self._contexts = model, contexts or [()] * sequences
        self._streams: dict[int, TextStream] = {}
        self._filters = [StopFilter(stops) for _ in self.whole]

    def push(self, tokens: list[int | None], ended: Callable[[int], bool]) -> list[str]:
        """Append one step's tokens, None for sequences without; return each sequence's new text.

        `ended` says whether a sequence gets no more tokens.
        """
        pieces = [""] * len(tokens)
        new = {i for i, token in enumerate(tokens) if token is not None}
        for i in new | self._streams.keys():
            token = tokens[i]
            if token is not None and self._tokenizer is not None:
                stream = self._streams.get(i) or TextStream(self._tokenizer, self._contexts[i])
                self._streams[i] = stream
                pieces[i] = self._filters[i].push(stream.push([token]))
            elif i in self._streams and ended(i):
                pieces[i] = self._filters[i].push(self._streams.pop(i).rest())
                pieces[i] += self._filters[i].finish()
            self.whole[i] += pieces[i]
        return pieces

    def finish(self) -> list[str]:
        """Return the held-back text of each sequence: a part of a character or of a stop string."""
        return self.push([None] * len(self.whole), lambda i: True)

    def stopped(self, i: int) -> bool:
        return self._filters[i].stopped

    @functools.cached_property
    def _tokenizer(self) -> Any:
        try:
            return self._model.tokenizer
        except InputError:  # missing or damaged; the prompts were given as token ids
            return None
