"""Sequences that require lookups: pass keys, key-value pairs, repeated passages, random runs.

    passage  needle  passage  needle  passage ... | question answer  question answer ...

Facts lie at random depths in passages of a book; questions follow at the end, in another order. A
fact's random letters, which cannot be predicted, have no weight in the loss. An answer has a higher
weight than a token of a book.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from benchmarks.reference_models.recipes import BOS, SPECIAL

Passage = Callable[[np.random.Generator, int], np.ndarray]  # consecutive tokens of a book

CONSONANTS, VOWELS = "bcdfghjklmnprstvwz", "aeiou"
KINDS = ("passkey", "pairs", "repeat")
SHARES = (0.4, 0.4, 0.2)
TOKENS_A_FACT = {"passkey": 100, "pairs": 24}  # tokens per fact in the densest sequences
SHORTEST = 48  # tokens that one fact and its question need


class Form(NamedTuple):
    """Wording of a fact and its question; `fact` contains {key} and {value}."""

    fact: str
    question: str
    answer: str = " {value}"
    close: str = ""


PASSKEY = (
    Form(
        "\nThe pass key of {key} is {value}. Remember it.",
        "\nWhat is the pass key of {key}? The pass key of {key} is",
        close=".",
    ),
    Form(
        "\nOne of the special magic numbers for {key} is: {value}.",
        "\nWhat is the special magic number for {key} mentioned in the provided text? "
        "The special magic number for {key} mentioned in the provided text is:",
        close=".",
    ),
    Form("\nThe secret number of {key} is {value}.", "\nThe secret number of {key} is", close="."),
)
PAIRS = (
    Form('\n "{key}": "{value}",', '\nKey: "{key}"\nCorresponding value: "', "{value}", '"'),
    Form("\n{key}: {value}", "\n{key}:"),
    Form("\nVAR {key} = {value}", "\nVAR {key} ="),
)


@dataclasses.dataclass(frozen=True)
class Lookup:
    """An answer: tokens [start, stop) of the sequence, and the position of its fact."""

    start: int
    stop: int
    fact: int
    key: str
    value: str


@dataclasses.dataclass(frozen=True)
class Sample:
    """A sequence: tokens [n] uint16, their weights in the loss [n] float32, and its lookups."""

    tokens: np.ndarray
    weights: np.ndarray
    lookups: tuple[Lookup, ...]


@dataclasses.dataclass(frozen=True)
class Fact:
    """Tokens of a fact, its question and its answer."""

    key: str
    value: str
    fact: list[int]
    question: list[int]
    answer: list[int]
    close: list[int]

    @property
    def length(self) -> int:
        """Number of tokens of the fact, its question and its answer."""
        return len(self.fact) + len(self.question) + len(self.answer) + len(self.close)


class Synthetic:
    """Makes sequences from a tokenizer and a source of passages.

    Args:
        tokenizer: the model's tokenizer.
        passage: source of book text around the facts.
        answer_weight: weight of an answer's tokens in the loss.
    """

    def __init__(self, tokenizer: Tokenizer, passage: Passage, answer_weight: float):
        self.tokenizer, self.passage, self.answer_weight = tokenizer, passage, answer_weight

    def draw(self, rng: np.random.Generator, length: int) -> Sample:
        """Draw a sequence of `length` tokens of a random kind."""
        kind = KINDS[int(rng.choice(len(KINDS), p=SHARES))]
        if kind == "repeat":
            return self.repeat(rng, length)
        most = max(2, length // TOKENS_A_FACT[kind])
        return self.lookups(rng, length, kind, _log_uniform(rng, 1, most))

    def lookups(
        self,
        rng: np.random.Generator,
        length: int,
        kind: str,
        count: int,
        depth: float | None = None,
    ) -> Sample:
        """Make up to `count` facts, as many as fit in 3/4 of the sequence, and their questions.

        The sequence is plain book text if no fact fits, as with a tokenizer of few words.

        Args:
            kind: "passkey" (sentences hidden in a book) or "pairs" (mostly one block of lines).
            depth: of a single fact, 0 (the beginning) to 1; None: anywhere.
        """
        facts = self._facts(rng, kind, count)
        room, taken = min(max(length * 3 // 4, SHORTEST), length - 1), 0
        chosen: list[Fact] = []
        for fact in facts:
            if taken + fact.length <= room:
                chosen.append(fact)
                taken += fact.length
        filler = length - 1 - taken
        block = kind == "pairs" and rng.random() < 0.7
        cuts = rng.integers(0, filler + 1, 1 if block else len(chosen))
        if depth is not None:
            cuts = np.full(cuts.shape, round(depth * filler))
        at = np.sort(np.broadcast_to(cuts, len(chosen)))
        text = self.passage(rng, filler)
        build = _Builder(self.answer_weight)
        places, before = [], 0
        for fact, cut in zip(chosen, at, strict=True):
            build.add(text[before:cut], 1.0)
            places.append(len(build))
            build.add(fact.fact, 0.0)
            before = cut
        build.add(text[before:], 1.0)
        for i in rng.permutation(len(chosen)):
            build.ask(chosen[i], places[i])
        return build.finish()

    def repeat(self, rng: np.random.Generator, length: int) -> Sample:
        """Repeat a passage: all tokens except its first can be looked up."""
        size = _log_uniform(rng, 8, max(9, length // 3))
        text = self.passage(rng, length - 1 - size)
        start = int(rng.integers(0, len(text) - size + 1))
        again = int(rng.integers(start + size, len(text) + 1))
        build = _Builder(self.answer_weight)
        build.add(text[:again], 1.0)
        copy = text[start : start + size]
        build.add(copy[:4], 0.0)
        place = len(build)
        build.add(copy[4:], 1.0)
        value = self.tokenizer.decode(copy[4:].tolist())
        build.lookups.append(Lookup(place, len(build), 1 + start + 4, "", value))
        build.add(text[again:], 1.0)
        return build.finish()

    def copies(self, rng: np.random.Generator, length: int) -> Sample:
        """Repeat a run of random tokens: all tokens after the first run can be looked up.

        This teaches induction fastest (Olsson et al., 2022), because every token requires a lookup
        of an earlier occurrence and nothing else.
        """
        size = _log_uniform(rng, 8, max(9, length // 2))
        ordinary = rng.integers(len(SPECIAL), self.tokenizer.get_vocab_size(), size)
        build = _Builder(self.answer_weight)
        build.add(ordinary, 0.0)
        build.add(np.resize(ordinary, length - 1 - size), 1.0)
        build.lookups.append(Lookup(1 + size, length, 1, "", ""))
        return build.finish()

    def _facts(self, rng: np.random.Generator, kind: str, count: int) -> list[Fact]:
        forms = PASSKEY if kind == "passkey" else PAIRS
        form = forms[int(rng.integers(len(forms)))]
        keys = _distinct(rng, count, word if rng.random() < 0.6 else hexadecimal)
        value = digits if kind == "passkey" or rng.random() < 0.5 else hexadecimal
        values = [value(rng) for _ in keys]
        parts = [
            part.format(key=key, value=v)
            for key, v in zip(keys, values, strict=True)
            for part in form
        ]
        encoded = self.tokenizer.encode_batch_fast(parts, add_special_tokens=False)
        ids = [encoding.ids for encoding in encoded]
        return [
            Fact(key, v, *ids[len(form) * i : len(form) * (i + 1)])
            for i, (key, v) in enumerate(zip(keys, values, strict=True))
        ]


class _Builder:
    """Assembles a sequence, from the beginning-of-sequence token on."""

    def __init__(self, answer_weight: float):
        self.tokens: list[np.ndarray] = [np.array([BOS], np.uint16)]
        self.weights: list[np.ndarray] = [np.zeros(1, np.float32)]
        self.lookups: list[Lookup] = []
        self.answer_weight, self.length = answer_weight, 1

    def __len__(self) -> int:
        return self.length

    def add(self, tokens: Sequence[int] | np.ndarray, weight: float) -> None:
        """Append tokens with a weight in the loss."""
        self.tokens.append(np.asarray(tokens, np.uint16))
        self.weights.append(np.full(len(tokens), weight, np.float32))
        self.length += len(tokens)

    def ask(self, fact: Fact, place: int) -> None:
        """Append a question and its answer, and record the lookup."""
        self.add(fact.question, 0.0)
        start = len(self)
        self.add(fact.answer, self.answer_weight)
        self.lookups.append(Lookup(start, len(self), place, fact.key, fact.value))
        self.add(fact.close, 1.0)

    def finish(self) -> Sample:
        """Return the assembled sequence."""
        return Sample(
            np.concatenate(self.tokens), np.concatenate(self.weights), tuple(self.lookups)
        )


def word(rng: np.random.Generator) -> str:
    """Return an invented word of two or three syllables."""
    size = int(rng.integers(2, 4))
    letters = zip(rng.choice(list(CONSONANTS), size), rng.choice(list(VOWELS), size), strict=True)
    return "".join(a + b for a, b in letters)


def hexadecimal(rng: np.random.Generator) -> str:
    """Return four to eight hexadecimal digits."""
    return "".join(rng.choice(list("0123456789abcdef"), int(rng.integers(4, 9))))


def digits(rng: np.random.Generator) -> str:
    """Return a number of four to seven digits."""
    return str(int(rng.integers(1, 10))) + "".join(
        rng.choice(list("0123456789"), rng.integers(3, 7))
    )


def _distinct(
    rng: np.random.Generator, count: int, make: Callable[[np.random.Generator], str]
) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < count:
        names[make(rng)] = None
    return list(names)


def _log_uniform(rng: np.random.Generator, low: int, high: int) -> int:
    return int(np.exp(rng.uniform(np.log(low), np.log(high + 1))))
