"""Texts as windows of tokens: of equal size, without overlap, each beginning like a prompt."""

import argparse
import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int

from infinigen_jax.errors import InputError, ParameterError
from infinigen_jax.files.regular import read_text
from infinigen_jax.numeric import whole_number
from infinigen_jax.settings.policy import BudgetSettings
from infinigen_jax.text.tokenizer import check_vocabulary

if TYPE_CHECKING:
    from infinigen_jax.evaluation.session import Session
    from infinigen_jax.loading.load import Model
    from infinigen_jax.models import ModelConfig

SMALLEST_WINDOW = 3  # one token to prefill, one to decode, one to score
LARGEST_WINDOW = 2048  # by default


@dataclasses.dataclass(frozen=True)
class Text:
    """A text file."""

    name: str
    content: str
    sha256: str

    @classmethod
    def read(cls, path: str, parameter: str = "text") -> "Text":
        """Read the file that a parameter names."""
        content = read_text(parameter, path)
        return cls(Path(path).name, content, hashlib.sha256(content.encode()).hexdigest())


def cut(
    prefix: Sequence[int], tokens: Int[np.ndarray, " t"], size: int, most: int | None = None
) -> Int[np.ndarray, "w n"]:
    """Return windows of `size` tokens, each with the prefix, at most `most`, evenly sampled."""
    length = size - len(prefix)
    available = len(tokens) // length
    if not available:
        total = len(tokens) + len(prefix)
        remedy = f"lower it to at most {total}, or give a longer `text`"
        remedy = remedy if total >= SMALLEST_WINDOW else "give a longer `text`"
        raise ParameterError("window", f"the text has only {total} tokens; {remedy}", size)
    count = available if most is None else min(most, available)
    rows = np.arange(count) * available // count
    chosen = tokens[: available * length].reshape(available, length)[rows]
    return np.concatenate([np.tile(np.array(prefix, np.int32), (count, 1)), chosen], axis=1)


def tokenize(
    text: Text, tokenizer: Any, vocabulary: int
) -> tuple[list[int], Int[np.ndarray, " t"]]:
    """Return the special tokens that begin every prompt, and the tokens of a text."""
    # The prefix is the special tokens before any text, without those after it.
    plain = tokenizer.encode("a", add_special_tokens=False)
    prefix = prefixed(tokenizer, "a")[: -len(plain)] if plain else []
    tokens = tokenizer.encode(text.content, add_special_tokens=False)
    check_vocabulary("text", [*prefix, *tokens], vocabulary)
    return prefix, np.array(tokens, np.int32)


def prefixed(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a prompt, with special tokens before it and none after it."""
    wrapped = tokenizer.encode(text)
    plain = tokenizer.encode(text, add_special_tokens=False)
    # A tokenizer may add a special token at the end, which a prompt must not have.
    extra = len(wrapped) - len(plain)
    in_front = next((i for i in range(extra + 1) if wrapped[i : i + len(plain)] == plain), 0)
    return wrapped[: in_front + len(plain)] if plain else wrapped


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of leading tokens that two sequences share."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def beginning(tokenizer: Any, config: "ModelConfig") -> int:
    """Return the token before a text without context: beginning of sequence, else end of text."""
    marks = (tokenizer.bos_token_id, config.bos_id, tokenizer.eos_token_id, *config.eos_ids)
    return next((mark for mark in marks if mark is not None), 0)


def split_context(
    tokenizer: Any, context: str, text: str, first: int
) -> tuple[list[int], list[int]]:
    """Split a context and a text into the tokens of a prompt and those to score, at least one each.

    A token that spans both belongs to the text. Spaces at the end of the context move to the text,
    because tokenizers join them to the next word. An empty context is replaced by `first`, see
    `beginning`.
    """
    stripped = context.rstrip(" ")
    whole = prefixed(tokenizer, context + text)
    context_tokens = prefixed(tokenizer, stripped)
    common = min(common_length(context_tokens, whole), len(whole) - 1)
    if not text or common < 0:
        raise InputError(f"nothing to score after {context[-40:]!r}; give a text")
    return whole[:common] or [first], whole[common:]


def add_window_options(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add --text, --window, --context, --windows and --chunk."""
    add = parser.add_argument
    add("--text", metavar="F", required=required, help="a text in UTF-8")
    sizes = f"tokens per window (default: the model's positions, at most {LARGEST_WINDOW})"
    add("--window", type=whole_number(SMALLEST_WINDOW), metavar="N", help=sizes)
    context = "leading tokens of a window that are not scored (default: half of it)"
    add("--context", type=whole_number(2), metavar="C", help=context)
    most = "maximum number of windows, spread evenly over the text (default: all)"
    add("--windows", type=whole_number(1), metavar="M", help=most)
    chunk = "tokens of a chunk, for results by position (default 256)"
    add("--chunk", type=whole_number(1), default=256, metavar="N", help=chunk)


def load_windows(session: "Session") -> tuple["Model", np.ndarray, dict[str, Any], int]:
    """Load the model and cut the text of a session, and describe both in its record.

    Say which policies select nothing in windows of this length. Return model, windows [w, n] int32,
    settings (see `cut_windows`) and number of scored tokens.
    """
    text = Text.read(session.arguments.text)
    model = session.load()
    windows, described = cut_windows(session.arguments, text, model)
    session.record |= described
    settings = described["settings"]
    chosen = [c.policy for c in session.chosen if isinstance(c.policy, BudgetSettings)]
    whole = [p for p in chosen if p.sinks + p.window >= settings["window"]]
    for name, recent in dict.fromkeys((p.name, p.window) for p in whole):
        resident = f"its sinks and {recent} recent tokens cover the whole text window"
        session.say(f"{name} selects nothing: {resident}; lower `{name}:window=`")
    return model, windows, settings, windows.size - len(windows) * settings["context"]


def cut_windows(
    arguments: argparse.Namespace, text: Text, model: "Model"
) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the windows [w, n] int32, and the result file's entries about them and the text."""
    positions, short = model.config.max_positions, model.config.longest_short
    size = min(positions, LARGEST_WINDOW) if arguments.window is None else arguments.window
    if size > positions:
        raise ParameterError("window", f"the model has {positions} positions; lower it", size)
    context = max(2, size // 2) if arguments.context is None else arguments.context
    problem = ""
    if context >= size:
        problem = (
            f"nothing is left to score in a window of {size} tokens; lower it to at most {size - 1}"
        )
    elif short and context <= short + 1 < size - 1:
        problem = (
            f"the model rotates the keys of texts above {short} tokens differently; give at least "
            f"{short + 2}, or a window of at most {short + 2}"
        )
    if problem:
        raise ParameterError("context", problem, context)
    prefix, tokens = tokenize(text, model.tokenizer, model.config.vocab_size)
    windows = cut(prefix, tokens, size, arguments.windows)
    settings = {
        "window": size,
        "context": context,
        "windows": len(windows),
        "batch": min(arguments.batch, len(windows)),
        "chunk": arguments.chunk,
    }
    described = {
        "file": text.name,
        "sha256": text.sha256,
        "characters": len(text.content),
        "tokens": len(tokens),
        "prefix_tokens": len(prefix),
        "windows": len(tokens) // (size - len(prefix)),
    }
    return windows, {"text": described, "settings": settings}
