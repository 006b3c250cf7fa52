"""Options of the sub-commands that measure windows of a text."""

import argparse
from typing import TYPE_CHECKING, Any

import numpy as np

from infinigen_jax.errors import ParameterError
from infinigen_jax.evaluation.texts import SMALLEST_WINDOW, Text, tokenize
from infinigen_jax.numeric import whole_number

if TYPE_CHECKING:
    from infinigen_jax.evaluation.session import Session
    from infinigen_jax.loading.load import Model
    from infinigen_jax.models import ModelConfig

LARGEST_WINDOW = 2048  # by default


def add_window_options(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add --text, --window, --context, --windows and --chunk."""
    add = parser.add_argument
    add("--text", metavar="F", required=required, help="a text in UTF-8")
    add(
        "--window",
        type=whole_number(SMALLEST_WINDOW),
        metavar="N",
        help=f"tokens per window (default: the model's positions, at most {LARGEST_WINDOW})",
    )
    add(
        "--context",
        type=whole_number(2),
        metavar="C",
        help="leading tokens of a window that are not scored (default: half of it)",
    )
    add(
        "--windows",
        type=whole_number(1),
        metavar="M",
        help="maximum number of windows, spread evenly over the text (default: all)",
    )
    add(
        "--chunk",
        type=whole_number(1),
        default=256,
        metavar="N",
        help="tokens of a chunk, for results by position (default 256)",
    )


def window_sizes(arguments: argparse.Namespace, config: "ModelConfig") -> tuple[int, int]:
    """Return the tokens of a window, and those of its context."""
    positions, short = config.max_positions, config.longest_short
    size = min(positions, LARGEST_WINDOW) if arguments.window is None else arguments.window
    if size > positions:
        raise ParameterError("window", f"the model has {positions} positions; lower it", size)
    context = max(2, size // 2) if arguments.context is None else arguments.context
    if context >= size:
        raise ParameterError(
            "context",
            f"nothing is left to score in a window of {size} tokens; lower it to at most "
            f"{size - 1}",
            context,
        )
    if short and context <= short + 1 < size - 1:
        raise ParameterError(
            "context",
            f"the model rotates the keys of texts above {short} tokens differently; give at least "
            f"{short + 2}, or a window of at most {short + 2}",
            context,
        )
    return size, context


def load_windows(session: "Session") -> tuple["Model", np.ndarray, dict[str, Any], int]:
    """Load the model and cut the text of a session, and describe both in its record.

    Return model, windows [w, n] int32, settings (see `cut_windows`) and number of scored tokens.
    """
    text = Text.read(session.arguments.text)
    model = session.load()
    windows, described = cut_windows(session.arguments, text, model)
    session.record |= described
    settings = described["settings"]
    return model, windows, settings, windows.size - len(windows) * settings["context"]


def cut_windows(
    arguments: argparse.Namespace, text: Text, model: "Model"
) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the windows [w, n] int32, and the result file's entries about them and the text."""
    size, context = window_sizes(arguments, model.config)
    tokens = tokenize(text, model.tokenizer, model.config.vocab_size)
    windows = tokens.cut(size, arguments.windows)
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
        "tokens": len(tokens.tokens),
        "prefix_tokens": len(tokens.prefix),
        "windows": tokens.windows(size),
    }
    return windows, {"text": described, "settings": settings}
