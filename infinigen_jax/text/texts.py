"""Streaming text of several sequences, up to their stop strings."""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from infinigen_jax.errors import InputError
from infinigen_jax.text.detokenize import TextStream
from infinigen_jax.text.stops import StopFilter

if TYPE_CHECKING:
    from infinigen_jax.loading.load import Model


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
                pieces[i] = self._filters[i].push(self._streams.pop(i).finish())
                pieces[i] += self._filters[i].finish()
            self.whole[i] += pieces[i]
        return pieces

    def finish(self) -> list[str]:
        """Return the held-back text of each sequence: a part of a character or of a stop string."""
        return self.push([None] * len(self.whole), lambda i: True)

    def stopped(self, i: int) -> bool:
        """Return whether a sequence has reached a stop string."""
        return self._filters[i].stopped

    @functools.cached_property
    def _tokenizer(self) -> Any:
        try:
            return self._model.tokenizer
        except InputError:
            # Missing or damaged. A prompt of text would have been refused with this error; a
            # prompt of token ids does not need a tokenizer.
            return None
