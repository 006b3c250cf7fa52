"""Perplexity of a text, for several policies and budgets, against the full cache.

The text is cut into windows; in each, the first tokens are context and the others are scored, by
the decode steps that generate text. All configurations score the same tokens, so their difference
to the full cache is paired, and its standard error much smaller than that of either.
"""

import argparse
import gc
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from infinigen_jax.errors import InputError
from infinigen_jax.evaluation.configurations import (
    Configuration,
    check,
    configurations,
    settings_of,
)
from infinigen_jax.evaluation.report import percent, provenance, table, with_error
from infinigen_jax.evaluation.statistics import Nats, statistics
from infinigen_jax.evaluation.texts import SMALLEST_WINDOW, read_text, tokenize
from infinigen_jax.options import add_engine_options
from infinigen_jax.output import checked_output, write_json

if TYPE_CHECKING:
    from infinigen_jax.checkpoint import Model
    from infinigen_jax.evaluation.scoring import Traffic

SUMMARY = "perplexity of a text, whole and by position"
LARGEST_WINDOW = 2048  # by default


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this sub-command."""
    add = parser.add_argument
    add("--model", metavar="DIR", help="converted or Hugging Face folder (default: embedded)")
    add("--text", metavar="F", required=True, help="a text in UTF-8")
    add(
        "--window",
        type=int,
        metavar="N",
        help=f"tokens per window (default: the model's positions, at most {LARGEST_WINDOW})",
    )
    add(
        "--context",
        type=int,
        metavar="C",
        help="leading tokens of a window that are not scored (default: half of it)",
    )
    add(
        "--windows",
        type=int,
        metavar="M",
        help="most windows, spread evenly over the text (default: all)",
    )
    add(
        "--batch",
        type=int,
        default=4,
        metavar="B",
        help="windows at once (default 4); only infinigen-paper's result depends on it",
    )
    add(
        "--chunk",
        type=int,
        default=256,
        metavar="N",
        help="tokens of a chunk, for perplexity by position (default 256)",
    )
    add_engine_options(parser, several=True)
    add("--no-reference", action="store_true", help="without the full cache as the first line")
    add("--json", metavar="F", help="write everything that was measured to a file")
    add("--quiet", action="store_true", help="no progress on stderr")


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Evaluate all configurations, print their table and write the JSON file."""
    check_numbers(arguments)
    text = read_text(arguments.text)
    output = checked_output("--json", arguments.json)
    chosen = configurations(arguments, reference=not arguments.no_reference)
    from infinigen_jax.checkpoint import embedded, load

    folder = embedded() if arguments.model is None else arguments.model
    model = load(folder, arguments.dtype, notify=say)
    check(chosen, model)
    size, context = window_sizes(arguments, model.config.max_positions)
    tokens = tokenize(text, model.tokenizer, model.config.vocab_size)
    windows = tokens.cut(size, arguments.windows)
    settings = {
        "window": size,
        "context": context,
        "windows": len(windows),
        "batch": min(arguments.batch, len(windows)),
        "chunk": arguments.chunk,
    }
    lines = evaluate(model, chosen, windows, settings, arguments)
    if output is not None:
        described = {
            "file": text.name,
            "sha256": text.sha256,
            "characters": len(text.content),
            "tokens": len(tokens.tokens),
            "prefix_tokens": len(tokens.prefix),
            "windows": tokens.windows(size),
        }
        record = {"command": "perplexity", "text": described, "settings": settings}
        record |= provenance(model, folder) | {"configurations": lines}
        write_json("--json", output, record)
    print(markdown(lines), flush=True)


def check_numbers(arguments: argparse.Namespace) -> None:
    """Refuse counts that make no sense for any model."""
    smallest = {"window": SMALLEST_WINDOW, "context": 2, "windows": 1, "batch": 1, "chunk": 1}
    for name, least in smallest.items():
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise InputError(f"--{name} {value}: it must be at least {least}")


def window_sizes(arguments: argparse.Namespace, positions: int) -> tuple[int, int]:
    """Tokens of a window, and those of its context."""
    size = min(positions, LARGEST_WINDOW) if arguments.window is None else arguments.window
    if size > positions:
        raise InputError(f"--window {size}: the model has {positions} positions; lower it")
    context = max(2, size // 2) if arguments.context is None else arguments.context
    if context >= size:
        raise InputError(
            f"--context {context}: nothing is left to score in a window of {size} tokens; lower "
            f"it to at most {size - 1}"
        )
    return size, context


def evaluate(
    model: "Model",
    chosen: list[Configuration],
    windows: np.ndarray,
    settings: dict[str, int],
    arguments: argparse.Namespace,
) -> list[dict[str, Any]]:
    """The measured record of each configuration; one engine lives at a time."""
    from infinigen_jax.evaluation.scoring import score_windows

    context, chunk = settings["context"], settings["chunk"]
    reference: Nats | None = None
    lines: list[dict[str, Any]] = []
    for number, configuration in enumerate(chosen, 1):
        started = time.perf_counter()
        engine = configuration.engine(model)
        described = {
            "policy": configuration.policy.name,
            "reference": number == 1 and not arguments.no_reference,
            "settings": settings_of(engine),
        }
        with tqdm(
            total=windows.size - len(windows) * context,
            desc=f"{number}/{len(chosen)} {configuration.label}",
            unit=" tokens",
            disable=arguments.quiet,
        ) as bar:
            nats, traffic = score_windows(engine, windows, context, settings["batch"], bar.update)
        line = described | statistics(nats, reference, context, chunk) | traffic_of(traffic)
        lines.append(line | {"seconds": time.perf_counter() - started})
        if described["reference"]:
            reference = nats
        del engine
        gc.collect()  # the device's arrays go before the next engine's come
    return lines


def traffic_of(traffic: "Traffic") -> dict[str, Any]:
    """What moved, per token."""
    tokens, rows = traffic.tokens, traffic.selected_rows
    return {
        "selected_fraction": traffic.selected / tokens,
        "fetched_fraction": traffic.fetched / tokens,
        "hot_set_hit_rate": 1 - traffic.fetched_rows / rows if rows else 0.0,
        "host_to_device_bytes_per_token": traffic.moved_bytes / tokens,
        "host_cache_bytes": traffic.host_cache_bytes,
        "device_index_bytes": traffic.device_index_bytes,
        "hot_set_bytes": traffic.hot_set_bytes,
    }


def markdown(lines: list[dict[str, Any]]) -> str:
    """The table for stdout."""
    from infinigen_jax.memory_limits import format_bytes

    head = "policy|budget|index|rows|perplexity|nats/token|Δ nats|Δ perplexity|selected|fetched"
    head = f"{head}|hot hits|moved/token|host cache|index size|seconds".split("|")
    rows = []
    for line in lines:
        settings, value = line["settings"], line["perplexity"]
        change = line["perplexity_change_percent"]
        rows.append(
            [
                line["policy"],
                f"{settings['budget']:g}" if "budget" in settings else "",
                settings.get("index_dtype", ""),
                settings["rows"],
                "" if value is None else f"{value:.4f}",
                with_error(line["nats_per_token"], line["standard_error"]),
                with_error(line["difference_nats"], line["difference_standard_error"], 5),
                "" if change is None else f"{change:+.3f} %",
                percent(line["selected_fraction"]),
                percent(line["fetched_fraction"]),
                percent(line["hot_set_hit_rate"], 1),
                format_bytes(int(line["host_to_device_bytes_per_token"])),
                format_bytes(line["host_cache_bytes"]),
                format_bytes(line["device_index_bytes"]),
                f"{line['seconds']:.1f}",
            ]
        )
    return table(head, rows, text_columns=4)
