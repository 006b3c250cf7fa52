"""Streaming detokenisation: text from tokens, without decoding all of them for each new token."""

from typing import Any

from infinigen_jax.errors import ParameterError

REPLACEMENT = "\ufffd"  # decoded from bytes that are not, or not yet, a character


def checked_text(parameter: str, text: str) -> str:
    """Return a text after checking that it is UTF-8.

    Arguments and stdin that are not UTF-8 arrive with lone surrogates.
    """
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise ParameterError(parameter, "not UTF-8 text; convert it first")
    return text


class TextStream:
    """Turns a sequence of token ids into text, piece by piece.

    The concatenated pieces equal `tokenizer.decode(all_ids, skip_special_tokens=True)`. The cost is
    linear in the number of tokens.

    The text of a token can depend on its neighbours in three ways:

        before it   a decoder may strip the space before the first word, so tokens are always
                    decoded after an earlier token, the context;
        after it    a token may end within a character and then decodes to U+FFFD, so text that ends
                    in U+FFFD is held back until the next token arrives;
        after it    tokens such as <0xE2>, one byte each, are decoded as a run, and one wrong byte
                    turns the whole run into U+FFFD, so they wait for the first other token.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._anchor_memo: dict[int, bool] = {}
        self._restart()

    def push(self, token_ids: list[int]) -> str:
        """Append tokens; return the text that became final and was not returned before."""
        before = self._ready
        for token in token_ids:
            if self._name(token) is None:
                continue  # a model's vocabulary may be larger than the tokenizer's
            self._pending.append(token)
            if self._is_anchor(token):
                self._ready = len(self._pending)
        if self._ready == before:
            return ""
        text = self._decode(self._context, self._pending[: self._ready])
        piece = text.removesuffix(REPLACEMENT)[self._shown :]
        self._shown += len(piece)
        self._settle(text)
        return piece

    def finish(self) -> str:
        """Return the rest of the text, final or not. The next `push` begins a new text."""
        piece = self._decode(self._context, self._pending)[self._shown :]
        self._restart()
        return piece

    def _restart(self) -> None:
        self._context: list[int] = []  # token before the pending ones; its text was returned
        self._pending: list[int] = []
        self._ready = 0  # number of pending tokens that can be decoded
        self._shown = 0  # number of characters of their text already returned

    def _settle(self, text: str) -> None:
        """Move settled tokens to the context; `text` is the text of the ready tokens."""
        if not text.endswith(REPLACEMENT):
            self._cut(self._ready, len(text))
            return
        # Text that continues with U+FFFD never ends in a whole character, but only the last
        # character is open. A character has at most four bytes, so one of the last four cuts is
        # clean. A cut inside a character gives one U+FFFD too many.
        ready = self._pending[: self._ready]
        for cut in range(len(ready) - 1, max(0, len(ready) - 5), -1):
            if not self._is_anchor(ready[cut - 1]):
                continue
            head = self._decode(self._context, ready[:cut])
            tail = self._decode(ready[cut - 1 : cut], ready[cut:])
            if tail and head + tail == text:
                self._cut(cut, len(head))
                return

    def _cut(self, count: int, characters: int) -> None:
        self._context = self._pending[count - 1 : count]
        self._pending = self._pending[count:]
        self._ready -= count
        self._shown -= characters

    def _decode(self, context: list[int], tokens: list[int]) -> str:
        """Return the text of `tokens` after `context`."""
        return self._raw(context + tokens)[len(self._raw(context)) :]

    def _raw(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def _name(self, token: int) -> str | None:
        return self._tokenizer.convert_ids_to_tokens(token)

    def _is_anchor(self, token: int) -> bool:
        """Return whether the token has text and is not one byte of a run.

        It decodes the token twice in a row, because a space at the start may be stripped.
        """
        known = self._anchor_memo.get(token)
        if known is None:
            name = self._name(token)
            assert name is not None
            byte = len(name) == 6 and name.startswith("<0x") and name.endswith(">")
            known = self._anchor_memo[token] = not byte and self._raw([token, token]) != ""
        return known
