"""Reading the files of "Lost in the Middle" (TACL 2024): jsonl, plain or .gz.

    {"ordered_kv_records": [[KEY, VALUE], ...], "key": KEY, "value": VALUE}
    {"question": Q, "answers": [A, ...], "ctxs": [{"title": T, "text": X, "isgold": true}, ...]}

An item that is too long loses records or documents, never the one that is asked for: from the end
of those before it and behind it in proportion, so that its depth stays.
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
    """The objects of a jsonl file, plain or .gz.

    Args:
        most: with more than this, so many of them, evenly spread.

    Raises:
        InputError: naming the option and the file, if it is not such a file.
    """
    try:
        data = Path(path).read_bytes()
        if path.endswith(".gz"):
            data = gzip.decompress(data)
        # Not by `splitlines`: strings may hold characters that it takes for ends of lines.
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
    """The items of a file, each shortened to a length.

    Args:
        most: so many of them, evenly spread over the file.
        length: in tokens, the answer's included.
        tokens: how many a prompt has.
        say: called with a line where items were shortened.

    Raises:
        InputError: for a file of another format, or a length that is too short.
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
    """Its parts, which of them is asked for, how they make a prompt, answers, name."""
    if "ordered_kv_records" in line:
        records = [(str(key), str(value)) for key, value in line["ordered_kv_records"]]
        key, value = str(line["key"]), str(line["value"])
        gold = records.index((key, value))
        return records, gold, lambda kept: key_value_prompt(kept, key), (value,), "kv"
    question, documents = line["question"], line["ctxs"]
    if not isinstance(line["answers"], list):
        raise TypeError("no list of answers")
    # Of nothing but an article nothing is left to compare, and every text would have it.
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
    """As many of the parts around the one asked for as fit."""
    others = len(parts) - 1

    def kept(count: int) -> list[Any]:
        before = round(count * gold / others) if others else 0
        behind = count - before
        return parts[:before] + [parts[gold]] + parts[gold + 1 : gold + 1 + behind]

    low, high = -1, others
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits("".join(prompt(kept(middle)))) else (low, middle - 1)
    return None if low < 0 else kept(low)
