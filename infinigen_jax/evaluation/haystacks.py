"""Generated retrieval problems of any length, seeded, in the style of RULER (COLM 2024).

    needle       one sentence with a number at some depth of an unrelated text
    kv           a JSON object; the question is the value of a key at some depth
    variables    X = 123, Y = X, Z = Y scattered over a text; all that have the value
    aggregation  a list of words; the most frequent ones

Random choices depend only on the seed and the item's number, so a longer item is the shorter one
with more filler.
"""

import dataclasses
import random
import re
import string
from collections.abc import Callable, Sequence

from infinigen_jax.errors import InputError

GRASS = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
HOPS = 4  # variables after the first that get the value
COMMON_WORDS = 3  # words that the aggregation asks for
KV_INTRODUCTION = (
    "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n"
)


@dataclasses.dataclass(frozen=True)
class Item:
    """A retrieval problem.

    Attributes:
        task: name of the task. One correct answer suffices for "qa"; others need all answers.
        context: first part of the prompt.
        question: second part of the prompt; the generated answer follows.
        answers: strings to search in the generated text.
        depth: position of the answer in the context, 0 to 1; None if it is spread over the text.
        length: tokens that the item was made for, including the answer.
        problem: name; items of a task with the same name differ only in length and depth.
    """

    task: str
    context: str
    question: str
    answers: tuple[str, ...]
    depth: float | None
    length: int
    problem: str


# Maps an amount of filler (sentences, pairs, words) to context, question and answers.
Build = Callable[[int], tuple[str, str, tuple[str, ...]]]


def sentences(text: str) -> list[str]:
    """Split a text into sentences, approximately."""
    words = " ".join(text.split())
    for mark in ".!?":
        words = words.replace(f"{mark} ", f"{mark}\n")
    return [sentence for sentence in words.split("\n") if sentence]


def generate(
    task: str, number: int, seed: int, depth: float | None, filler: Sequence[str]
) -> Build:
    """Return the builder of one problem of a task in TASKS, for any amount of filler.

    Args:
        number: number of the item.
        filler: sentences of the texts, taken cyclically from a random start.
    """
    return TASKS[task](f"{seed} {task} {number}", depth, filler)


def fitted(build: Build, fits: Callable[[str], bool], least: int = 0) -> int | None:
    """Return the largest amount of filler whose prompt fits; None if not even `least` does."""

    def short_enough(amount: int) -> bool:
        context, question, _ = build(amount)
        return fits(context + question)

    if not short_enough(least):
        return None
    low, high = least, least + 1
    while short_enough(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if short_enough(middle) else (low, middle)
    return low


def _needle(seed: str, depth: float | None, filler: Sequence[str]) -> Build:
    rng = random.Random(seed)
    word, value, start = _word(rng), str(rng.randrange(10**6, 10**7)), rng.randrange(len(filler))
    topic = f"the special magic number for {word}"

    def build(amount: int) -> tuple[str, str, tuple[str, ...]]:
        text = _text(filler, start, amount)
        text.insert(round((depth or 0) * amount), f"One of the facts: {topic} is {value}.")
        introduction = "A special magic number is hidden within the following text. Memorize it.\n"
        question = f"\nWhat is {topic} mentioned in the text? T{topic[1:]} is"
        return introduction + " ".join(text), question, (value,)

    return build


def _key_value(seed: str, depth: float | None, filler: Sequence[str]) -> Build:
    rng = random.Random(seed)
    pair = [_hex(rng), _hex(rng)]

    def build(amount: int) -> tuple[str, str, tuple[str, ...]]:
        rng = random.Random(f"{seed} others")
        pairs = [[_hex(rng), _hex(rng)] for _ in range(amount)]
        pairs.insert(round((depth or 0) * amount), pair)
        return key_value_prompt(pairs, pair[0]) + ((pair[1],),)

    return build


def key_value_prompt(pairs: Sequence[Sequence[str]], key: str) -> tuple[str, str]:
    """Return context and question in the format of "Lost in the Middle"."""
    lines = ",\n ".join(f'"{k}": "{v}"' for k, v in pairs)
    return f"{KV_INTRODUCTION}{{{lines}}}", f'\n\nKey: "{key}"\nCorresponding value:'


def _variables(seed: str, depth: float | None, filler: Sequence[str]) -> Build:
    rng = random.Random(seed)
    names: list[str] = []
    while len(names) < HOPS + 1:
        name = "".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5))
        names += [name] if name not in names else []
    value, start = str(rng.randrange(10**4, 10**5)), rng.randrange(len(filler))
    places = sorted(rng.random() for _ in names)
    sources = [value, *(f"VAR {name}" for name in names)]

    def build(amount: int) -> tuple[str, str, tuple[str, ...]]:
        text = _text(filler, start, amount)
        # From the last one backwards, so that an insertion does not move the others.
        for name, source, place in reversed(list(zip(names, sources, places, strict=False))):
            text.insert(round(place * amount), f"VAR {name} = {source}.")
        introduction = "Memorize and track the chain of variable assignment hidden in the text.\n"
        question = (
            f"\nQuestion: Find all variables that are assigned the value {value} in the text above."
            f"\nAnswer: {len(names)} variables are assigned the value {value}, they are:"
        )
        return introduction + " ".join(text), question, tuple(names)

    return build


def _aggregation(seed: str, depth: float | None, filler: Sequence[str]) -> Build:
    common = sorted({_word(random.Random(f"{seed} {i}")) for i in range(COMMON_WORDS)})

    def build(amount: int) -> tuple[str, str, tuple[str, ...]]:
        rng = random.Random(f"{seed} others")
        often = max(3, amount // 10)  # a common word for every ten others
        words = [_word(rng) for _ in range(amount)] + common * often
        rng.shuffle(words)
        listed = " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))
        introduction = "Below is a numbered list of words. Memorize the ones that appear most.\n"
        question = (
            f"\nQuestion: What are the {len(common)} most common words in the above list?"
            "\nAnswer: The words that appear most often in the list are:"
        )
        return introduction + listed, question, tuple(common)

    return build


TASKS: dict[str, Callable[[str, float | None, Sequence[str]], Build]] = {
    "needle": _needle,
    "kv": _key_value,
    "variables": _variables,
    "aggregation": _aggregation,
}
WITH_DEPTH = ("needle", "kv")


def make_items(
    tasks: Sequence[str],
    lengths: Sequence[int],
    depths: Sequence[float],
    count: int,
    seed: int,
    filler: Sequence[str],
    tokens: Callable[[str], int],
) -> list[Item]:
    """Make `count` items for each task, length and depth.

    Args:
        tokens: counts the tokens of a prompt.

    Raises:
        InputError: a length is too short for a task.
    """
    items = []
    for task in tasks:
        for length in lengths:
            for depth in depths if task in WITH_DEPTH else [None]:
                for number in range(count):
                    build = generate(task, number, seed, depth, filler)
                    items.append(_fit(task, build, length, depth, number, tokens))
    return items


def _fit(
    task: str,
    build: Build,
    length: int,
    depth: float | None,
    number: int,
    tokens: Callable[[str], int],
) -> Item:
    room = length - answer_tokens(build(0)[2], tokens)
    amount = fitted(build, lambda prompt: tokens(prompt) <= room)
    if amount is None:
        context, question, _ = build(0)
        least = length - room + tokens(context + question)
        raise InputError(f"--length {length}: {task} needs at least {least} tokens; raise it")
    return Item(task, *build(amount), depth, length, str(number))


def normalised(text: str) -> str:
    """Normalise a text like SQuAD: no case, punctuation, articles or double spaces."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def answer_tokens(answers: Sequence[str], tokens: Callable[[str], int]) -> int:
    """Return the tokens to generate for the answers, with some for surrounding words."""
    return tokens(" " + ", ".join(answers)) + 8


def _text(filler: Sequence[str], start: int, amount: int) -> list[str]:
    return [filler[(start + i) % len(filler)] for i in range(amount)]


def _word(rng: random.Random) -> str:
    """Return an invented word of three syllables."""
    return "".join(rng.choice("bdfgklmnprstv") + rng.choice("aeiou") for _ in range(3))


def _hex(rng: random.Random) -> str:
    return f"{rng.randrange(16**8):08x}"
