"""Reader of the data files of "Lost in the Middle" (TACL 2024): jsonl, plain or .gz.

    {"ordered_kv_records": [[KEY, VALUE], ...], "key": KEY, "value": VALUE}
    {"question": Q, "answers": [A, ...], "ctxs": [{"title": T, "text": X, "isgold": true}, ...]}

An item that is too long loses records or documents, but never the one with the answer. They are
removed before and after it in proportion, so its depth stays.
"""

import gzip
import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from infinigen_jax.errors import InputError
from infinigen_jax.evaluation.haystacks import Item, answer_tokens, key_value_prompt, normalised

QA_INTRODUCTION = (
    "Write a high-quality answer for the given question using only the provided search results "
    "(some of which might be irrelevant).\n\n"
)


def read_lines(option: str, path: str, most: int | None = None) -> list[dict[str, Any]]:
    """Read the objects of a jsonl file, plain or .gz.

    Args:
        option: option to name in errors.
        most: maximum number of objects; a longer file is sampled evenly.

    Raises:
        InputError: names the option and the file if it is not jsonl.
    """
    try:
        data = Path(path).read_bytes()
        if path.endswith(".gz"):
            data = gzip.decompress(data)
        # Not `splitlines`, which also splits at characters that strings may contain.
        text = data.decode("utf-8-sig").split("\n")
        lines = [json.loads(line) for line in text if line.strip()]
        json.dumps(lines, ensure_ascii=False).encode()  # lone surrogates are escaped in JSON
    except RecursionError:
        raise InputError(f"{option} {path}: nested too deeply; give another file") from None
    except (ValueError, EOFError, zlib.error) as error:
        raise InputError(f"{option} {path}: not jsonl ({error}); give another file") from None
    except OSError as error:
        reason = error.strerror or str(error)  # of a damaged .gz
        raise InputError(f"{option} {path}: {reason}; give a jsonl file") from None
    if not lines or not all(isinstance(line, dict) for line in lines):
        raise InputError(f"{option} {path}: give a file with one JSON object a line")
    count = len(lines) if most is None else min(most, len(lines))
    return [lines[i * len(lines) // count] for i in range(count)]


def read_items(
    path: str,
    most: int | None,
    length: int,
    tokens: Callable[[str], int],
    say: Callable[[str], None] = lambda message: None,
) -> list[Item]:
    """Read the items of a file and shorten each to a length.

    Args:
        most: maximum number of items, evenly sampled from the file.
        length: tokens, including the answer.
        tokens: counts the tokens of a prompt.
        say: called with a line if items were shortened.

    Raises:
        InputError: the file has another format, or the length is too short.
    """
    items, cut = [], []
    for number, line in enumerate(read_lines("--data", path, most), 1):
        try:
            parts, gold, prompt, answers, task = _parsed(line)
        except (KeyError, TypeError, ValueError, AttributeError, StopIteration):
            raise InputError(
                f"--data {path}: item {number} is neither key-value retrieval nor multi-document "
                "QA of Lost in the Middle; give such a file"
            ) from None
        room = length - answer_tokens(answers[:1], tokens)
        kept = _shortened(parts, gold, prompt, lambda text, room=room: tokens(text) <= room)
        if kept is None:
            raise InputError(f"--length {length}: too short for {path}; raise it")
        if len(kept) < len(parts):
            cut.append((len(kept), len(parts)))
        depth = gold / max(1, len(parts) - 1)
        items.append(Item(task, *prompt(kept), answers, depth, length, f"{path} {number}"))
    if cut:
        few, whole = min(cut)
        say(
            f"{path}: {len(cut)} of {len(items)} items are cut to --length {length}, one from "
            f"{whole} records or documents to {few}"
        )
    return items


Prompt = Callable[[Sequence[Any]], tuple[str, str]]


def _parsed(line: dict[str, Any]) -> tuple[list[Any], int, Prompt, tuple[str, ...], str]:
    """Return the item's parts, the index of the relevant part, a prompt builder, answers, name."""
    if "ordered_kv_records" in line:
        records = [(str(key), str(value)) for key, value in line["ordered_kv_records"]]
        key, value = str(line["key"]), str(line["value"])
        gold = records.index((key, value))
        return records, gold, lambda kept: key_value_prompt(kept, key), (value,), "kv"
    question, documents = line["question"], line["ctxs"]
    if not isinstance(line["answers"], list):
        raise TypeError("no list of answers")
    # An answer that consists of an article normalises to nothing, which every text contains.
    answers = tuple(answer for answer in line["answers"] if normalised(answer))
    if not answers:
        raise ValueError("no answers")
    gold = next(i for i, c in enumerate(documents) if c.get("isgold") or c.get("hasanswer"))

    def prompt(kept: Sequence[Any]) -> tuple[str, str]:
        listed = "\n".join(
            f"Document [{i}](Title: {c['title']}) {c['text']}" for i, c in enumerate(kept, 1)
        )
        return QA_INTRODUCTION + listed, f"\n\nQuestion: {question}\nAnswer:"

    prompt(documents)
    return documents, gold, prompt, answers, "qa"


def _shortened(
    parts: list[Any], gold: int, prompt: Prompt, fits: Callable[[str], bool]
) -> list[Any] | None:
    """Keep as many parts around the relevant one as fit."""
    others = len(parts) - 1

    def kept(count: int) -> list[Any]:
        before = round(count * gold / others) if others else 0
        after = count - before
        return parts[:before] + [parts[gold]] + parts[gold + 1 : gold + 1 + after]

    low, high = -1, others
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits("".join(prompt(kept(middle)))) else (low, middle - 1)
    return None if low < 0 else kept(low)
