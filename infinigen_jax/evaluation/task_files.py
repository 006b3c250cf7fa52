"""Multiple-choice items from jsonl files, with the field names of the datasets or of collections.

    copa        premise, question (cause, effect), choice1, choice2, label
    openbookqa  question_stem (or question.stem), choices {text, label}, answerKey
    winogrande  sentence with "_", option1, option2, answer (1, 2)
    piqa        goal, sol1, sol2, label
    rte         premise, hypothesis, label (0: entailment)
    any         query, choices, gold; with `connector`, as COPA; prefix, suffix, choices, gold, as
                WinoGrande

Which one it is, the names tell.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from infinigen_jax.errors import InputError
from infinigen_jax.evaluation.lost_in_the_middle import read_lines

CONNECTORS = {"cause": "because", "effect": "therefore"}


@dataclasses.dataclass(frozen=True)
class Choices:
    """An item: which of the texts is the likeliest?

    Attributes:
        contexts: one for each choice; they differ where the choice is inside (WinoGrande).
        texts: what is scored behind its context; a space is part of it.
        gold: the right one.
    """

    contexts: tuple[str, ...]
    texts: tuple[str, ...]
    gold: int

    @property
    def example(self) -> str:
        """The item with its answer, to be shown before others."""
        return self.contexts[self.gold] + self.texts[self.gold]


def read_choices(path: str, most: int | None = None) -> list[Choices]:
    """The items of a file.

    Args:
        most: with more than this, so many of them, evenly spread.

    Raises:
        InputError: naming the file, if it cannot be read or has other fields.
    """
    lines, items = read_lines("--data", path, most), []
    for number, line in enumerate(lines, 1):
        try:
            item = _parser(line)(line)
            if not (2 <= len(item.texts) == len(item.contexts) > item.gold >= 0):
                raise ValueError("no right answer among its choices")
            if not all(isinstance(t, str) and t.strip() for t in (*item.contexts, *item.texts)):
                raise ValueError("an empty text, or one that is none")
        except (KeyError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as e:
            reason = f"no field {e}" if isinstance(e, KeyError) else str(e)
            raise InputError(
                f"--data {path}: item {number}: {reason}; give items of COPA, OpenBookQA, "
                "WinoGrande, PIQA, RTE, or with query, choices and gold"
            ) from None
        items.append(item)
    return items


def _parser(line: dict[str, Any]) -> Callable[[dict[str, Any]], Choices]:
    for name, parse in PARSERS.items():
        if name in line:
            return parse
    raise ValueError("none of the known fields")


def _one_context(context: str, choices: list[str], gold: int) -> Choices:
    return Choices((context,) * len(choices), tuple(f" {c.strip()}" for c in choices), gold)


def _copa(line: dict[str, Any]) -> Choices:
    if "hypothesis" in line:
        return _rte(line)
    connector = CONNECTORS[line["question"]]
    return _caused(line["premise"], connector, [line["choice1"], line["choice2"]], line["label"])


def _caused(premise: str, connector: str, choices: list[str], gold: Any) -> Choices:
    # Each choice goes on in the sentence.
    lower = [choice[0].lower() + choice[1:] for choice in choices]
    return _one_context(f"{premise.strip().rstrip('.')} {connector}", lower, int(gold))


def _rte(line: dict[str, Any]) -> Choices:
    label = line["label"]
    gold = {"entailment": 0, "not_entailment": 1}[label] if isinstance(label, str) else int(label)
    context = f"{line['premise']}\nQuestion: {line['hypothesis']} True or False?\nAnswer:"
    return _one_context(context, ["True", "False"], gold)


def _openbookqa(line: dict[str, Any]) -> Choices:
    nested = line.get("question")
    stem, choices = line.get("question_stem"), line.get("choices")
    if isinstance(nested, dict):
        stem, choices = nested["stem"], nested["choices"]
    if isinstance(choices, dict):  # columns, as the datasets library has them
        texts, labels = choices["text"], choices["label"]
    else:
        texts, labels = ([choice[key] for choice in choices or []] for key in ("text", "label"))
    if not isinstance(stem, str):
        raise KeyError("question_stem")
    return _one_context(stem, list(texts), list(labels).index(line["answerKey"]))


def _winogrande(line: dict[str, Any]) -> Choices:
    before, behind = line["sentence"].split("_")
    return _inside(before, behind, [line["option1"], line["option2"]], int(line["answer"]) - 1)


def _inside(before: str, behind: str, choices: list[str], gold: int) -> Choices:
    """What follows the gap is scored, behind each choice."""
    return Choices(tuple(before + c for c in choices), (behind,) * len(choices), gold)


def _piqa(line: dict[str, Any]) -> Choices:
    context = f"Question: {line['goal']}\nAnswer:"
    return _one_context(context, [line["sol1"], line["sol2"]], int(line["label"]))


def _plain(line: dict[str, Any]) -> Choices:
    gold = int(line["gold"])
    if "connector" in line:
        return _caused(line["query"], line["connector"], line["choices"], gold)
    return _one_context(line["query"], line["choices"], gold)


def _plain_inside(line: dict[str, Any]) -> Choices:
    return _inside(line["prefix"], line["suffix"], line["choices"], int(line["gold"]))


# By a field that only they have; in this order.
PARSERS: dict[str, Callable[[dict[str, Any]], Choices]] = {
    "query": _plain,
    "prefix": _plain_inside,
    "sentence": _winogrande,
    "goal": _piqa,
    "answerKey": _openbookqa,
    "premise": _copa,
}
