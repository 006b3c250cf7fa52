"""Text from tokens as they come, without decoding everything again for each token."""

import functools
from typing import TYPE_CHECKING, Any

from infinigen_jax.errors import InputError

if TYPE_CHECKING:
    from infinigen_jax.loading.load import Model

REPLACEMENT = "\ufffd"  # what a decoder makes of bytes that are not, or not yet, a character


def checked_text(where: str, text: str) -> str:
    """Text of UTF-8; what was not, in an argument or on stdin, comes as lone surrogates.

    Raises:
        InputError: beginning with `where`.
    """
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise InputError(f"{where}: not UTF-8 text; convert it first")
    return text


class TextStream:
    """Turns a sequence of token ids into text, piece by piece.

    The pieces, put together, are exactly `tokenizer.decode(all_ids, skip_special_tokens=True)`.
    The cost is linear in the number of tokens.

    What a token means can depend on its neighbours, in three ways:

        before it   a decoder may strip the space in front of the very first word: tokens are
                    always decoded behind one of those before them, the context;
        behind it   a token may end within a character; it decodes to U+FFFD then, so text that
                    ends in U+FFFD is held back until the next token shows what it is;
        behind it   tokens like <0xE2>, one byte each, are decoded as a run: a single wrong byte
                    makes U+FFFD of the whole run. They wait for the first token that is none.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._anchor_memo: dict[int, bool] = {}
        self._restart()

    def push(self, token_ids: list[int]) -> str:
        """Take the next tokens; return the text that is certain by now and was not yet returned."""
        before = self._ready
        for token in token_ids:
            if self._name(token) is None:
                continue  # models may have more numbers than their tokenizer has tokens
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
        """The rest of the text, whatever it is. The next `push` begins a new text."""
        piece = self._decode(self._context, self._pending)[self._shown :]
        self._restart()
        return piece

    def _restart(self) -> None:
        self._context: list[int] = []  # the token before the pending ones; its text is returned
        self._pending: list[int] = []
        self._ready = 0  # this many of the pending tokens can be decoded
        self._shown = 0  # this many characters of their text are returned

    def _settle(self, text: str) -> None:
        """Make settled tokens the context; `text` is that of the ready tokens."""
        if not text.endswith(REPLACEMENT):
            self._cut(self._ready, len(text))
            return
        # Text that goes on as U+FFFD never ends in a whole character, but only the last of them
        # is open. A character has at most four bytes, so one of the last four cuts is clean. With
        # a cut inside a character, the two parts have one U+FFFD too many.
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
        """The text of `tokens` behind `context`."""
        return self._raw(context + tokens)[len(self._raw(context)) :]

    def _raw(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def _name(self, token: int) -> str | None:
        return self._tokenizer.convert_ids_to_tokens(token)

    def _is_anchor(self, token: int) -> bool:
        """Whether the token has text, and is not one byte of a run.

        Twice the token, because a lone space in front may be stripped.
        """
        known = self._anchor_memo.get(token)
        if known is None:
            name = self._name(token)
            assert name is not None
            byte = len(name) == 6 and name.startswith("<0x") and name.endswith(">")
            known = self._anchor_memo[token] = not byte and self._raw([token, token]) != ""
        return known


class Texts:
    """Text of several sequences, as their tokens come.

    Attributes:
        whole: of each, what is certain by now.
    """

    def __init__(self, model: "Model", sequences: int):
        self.whole = [""] * sequences
        self._model = model
        self._streams: dict[int, TextStream] = {}

    def push(self, tokens: list[int | None]) -> list[str]:
        """Text that one step's tokens complete, per sequence; None for one that has ended."""
        pieces = [""] * len(tokens)
        for i, token in enumerate(tokens):
            if token is not None and self._tokenizer is not None:
                stream = self._streams.get(i) or TextStream(self._tokenizer)
                self._streams[i] = stream
                pieces[i] = stream.push([token])
            elif i in self._streams:
                # What was held back is text before anything is printed behind it.
                pieces[i] = self._streams.pop(i).finish()
        return self._add(pieces)

    def finish(self) -> list[str]:
        """Text that was held back because a character was incomplete, per sequence."""
        pieces = [""] * len(self.whole)
        while self._streams:
            i, stream = self._streams.popitem()
            pieces[i] = stream.finish()
        return self._add(pieces)

    @functools.cached_property
    def _tokenizer(self) -> Any:
        try:
            return self._model.tokenizer
        except InputError:
            # Missing or damaged; a prompt of text would have been refused with this error, for
            # one of token numbers it is not needed.
            return None

    def _add(self, pieces: list[str]) -> list[str]:
        for i, piece in enumerate(pieces):
            self.whole[i] += piece
        return pieces
