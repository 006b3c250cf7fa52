"""Streaming detokenisation: text from tokens, without decoding all of them for each new token."""

import functools
from collections.abc import Sequence
from typing import Any

from infinigen_jax.errors import ParameterError

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


class TextStream:
    """Streaming text of a sequence of token ids.

    The concatenated pieces equal `tokenizer.decode(all_ids, skip_special_tokens=True)`, except for
    bytes that form no valid character. The cost is linear in the number of tokens.

    Tokens are decoded after the token before them, because a decoder may strip the space before the
    first word. A token may end within a character and then decodes to U+FFFD, so text that ends in
    U+FFFD is held back for the next tokens.

    The text continues that of `context`, which may begin within a character and is not used if it
    ends within one.
    """

    def __init__(self, tokenizer: Any, context: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._has_text = functools.cache(self._decides_text)
        self._restart()
        parts = ([*context[i:]] for i in range(len(context)))
        whole = (part for part in parts if not self._decode(part).endswith(REPLACEMENT))
        self._context = next(whole, [])

    def push(self, token_ids: list[int]) -> str:
        """Append tokens; return the text that became final and was not returned before."""
        return "".join(self._push(token) for token in token_ids if self._has_text(token))

    def finish(self) -> str:
        """Return the rest of the text, final or not. The next `push` begins a new text."""
        text = self._text()
        self._restart()
        return text

    def _restart(self) -> None:
        self._context: list[int] = []  # tokens before the pending ones; their text was returned
        self._pending: list[int] = []

    def _push(self, token: int) -> str:
        self._pending.append(token)
        text, held = self._text(), 0
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

    def _text(self) -> str:
        """Return the text of the pending tokens after their context."""
        return self._decode(self._context + self._pending)[len(self._decode(self._context)) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def _decides_text(self, token: int) -> bool:
        """Return whether a token is neither special nor outside of the tokenizer's vocabulary.

        It decodes the token twice in a row, because a space at the start may be stripped.
        """
        known = self._tokenizer.convert_ids_to_tokens(token) is not None
        return known and self._decode([token, token]) != ""
