"""Needles: a number at some depth of a text of any length, as in RULER (COLM 2024).

The text is unrelated, or consists of other numbers, as in a key-value lookup. Random choices depend
only on the seed and the item's number, so a longer item is the shorter one with more text around
the needle.
"""

import dataclasses
import random
import re
from collections.abc import Callable, Sequence

from infinigen_jax.errors import ParameterError

GRASS = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
INTRODUCTION = "A special magic number is hidden within the following text. Memorize it.\n"


@dataclasses.dataclass(frozen=True)
class Item:
    """A needle in a haystack.

    Attributes:
        context, question: parts of the prompt; the generated answer follows.
        depth: position of the needle in the context, 0 to 1.
        length: tokens that the item was made for, including the answer.
        number: number of the needle; items with the same one differ only in length and depth.
    """

    context: str
    question: str
    answer: str
    depth: float
    length: int
    number: int


def sentences(text: str) -> list[str]:
    """Split a text into sentences, approximately."""
    return [s for s in re.split("(?<=[.!?]) ", " ".join(text.split())) if s]


def answer_tokens(answer: str, tokens: Callable[[str], int]) -> int:
    """Return the tokens to generate for an answer, with some for surrounding words."""
    return tokens(f" {answer}") + 8


def make_item(
    number: int,
    seed: int,
    depth: float,
    length: int,
    filler: Sequence[str] | None,
    tokens: Callable[[str], int],
    frame: tuple[str, str] = ("", ""),
) -> Item:
    """Return an item with as many sentences as fit.

    Args:
        filler: sentences of the text, taken cyclically from a random start; None for other numbers,
            each with a different word.
        frame: text of a chat template before the context and after the question.
    """
    rng = random.Random(f"{seed} needle {number}")
    topic, value = _fact(rng)
    start = rng.randrange(len(filler)) if filler else 0
    before, after = frame
    question = f"\nWhat is {topic} mentioned in the text?{after or ' '}T{topic[1:]} is"
    room = length - answer_tokens(value, tokens)

    def sentence(i: int) -> str:
        if filler:
            return filler[(start + i) % len(filler)]
        return _sentence(*_fact(random.Random(f"{seed} needle {number} other {i}")))

    def context(amount: int) -> str:
        text = [sentence(i) for i in range(amount)]
        text.insert(round(depth * amount), _sentence(topic, value))
        return before + INTRODUCTION + " ".join(text)

    def used(amount: int) -> int:
        return tokens(context(amount) + question)

    if used(0) > room:
        least = length - room + used(0)
        raise ParameterError("length", f"a needle needs at least {least} tokens; raise it", length)
    low, high = 0, 1
    while used(high) <= room:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if used(middle) <= room else (low, middle)
    return Item(context(low), question, value, depth, length, number)


def _fact(rng: random.Random) -> tuple[str, str]:
    """Return the topic of a number, and the number."""
    word = "".join(rng.choice("bdfgklmnprstv") + rng.choice("aeiou") for _ in range(3))
    return f"the special magic number for {word}", str(rng.randrange(10**6, 10**7))


def _sentence(topic: str, value: str) -> str:
    return f"One of the facts: {topic} is {value}."
