"""Provenance of a result, names of its lines, and formatting of tables."""

import datetime
import hashlib
import importlib.metadata
import math
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

if TYPE_CHECKING:
    from infinigen_jax.loading.load import Model

# Headings of settings in tables.
COLUMNS = {"index_dtype": "index", "partial_ratio": "columns", "dense_layers": "dense"}
PACKAGES = ("infinigen-jax", "jax", "jaxlib", "flax", "numpy", "transformers")


def provenance(model: "Model", folder: str | Path) -> dict[str, Any]:
    """Return model, versions, device and date, ready for JSON; file names without folders.

    The model was loaded from `folder`; its conversion may lie elsewhere.
    """
    import jax

    from infinigen_jax.checkpoint.manifest import MANIFEST_FILE
    from infinigen_jax.models.small_weights import small_dtype

    config, device = model.config, jax.devices()[0]
    manifest = None if model.path is None else model.path / MANIFEST_FILE
    return {
        "model": {
            "name": Path(folder).resolve().name,
            "dtype": model.dtype.name,
            "weight_dtype": small_dtype(model.params["layers"][0]) or model.dtype.name,
            "skew": model.skew,
            "layers": config.num_layers,
            "heads": config.num_heads,
            "kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "positions": config.max_positions,
            # The manifest holds the hashes of all files of the model.
            "manifest_sha256": manifest and hashlib.sha256(manifest.read_bytes()).hexdigest(),
        },
        "versions": {"python": platform.python_version()} | {p: version_of(p) for p in PACKAGES},
        "device": f"{device.platform}: {device.device_kind}",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None  # a checkout that is not installed


def name_columns(lines: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the headings of the columns that name a line, and their cells for each line.

    The number of dense layers, which affects traffic and host cache, is shown whenever it differs.
    """
    settings = _distinguishing(lines)
    if len({line["settings"]["dense_layers"] for line in lines}) > 1:
        settings = list(dict.fromkeys([*settings, "dense_layers"]))
    head = ["policy", "budget", *(COLUMNS.get(s, s.replace("_", " ")) for s in settings)]
    return head, _cells(lines, settings)


def labels(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Return a short label for each line: policy, budget and the settings that distinguish it."""
    return [" ".join(filter(None, cells)) for cells in _cells(lines, _distinguishing(lines))]


def _distinguishing(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Return the settings, except the budget, in which lines of the same policy differ.

    A policy's name implies its defaults, so other settings distinguish no lines.
    """
    names: dict[str, None] = {}
    for policy in dict.fromkeys(line["policy"] for line in lines):
        settings = [line["settings"] for line in lines if line["policy"] == policy]
        for name in settings[0]:
            if name != "budget" and any(s.get(name) != settings[0][name] for s in settings):
                names.setdefault(name)
    return list(names)


def _cells(lines: Sequence[dict[str, Any]], settings: Sequence[str]) -> list[list[str]]:
    return [
        [line["policy"], *(_cell(line["settings"].get(s)) for s in ("budget", *settings))]
        for line in lines
    ]


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return "" if value is None else str(value)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    """Format a Markdown table, aligned for terminals; its first `text_columns` are left-aligned."""
    widths = [max(3, *map(len, column)) for column in zip(head, *rows, strict=True)]
    justify = [str.ljust if i < text_columns else str.rjust for i in range(len(widths))]

    def line(cells: Sequence[str]) -> str:
        places = zip(justify, cells, widths, strict=True)
        return f"| {' | '.join(to(cell, width) for to, cell, width in places)} |"

    marks = ["-" * (n - 1) + ("-" if i < text_columns else ":") for i, n in enumerate(widths)]
    return "\n".join([line(head), line(marks), *map(line, rows)])


def mean_and_error(samples: Float[np.ndarray, " w"]) -> tuple[float, float | None]:
    """Return the mean of independent samples and its standard error, None for a single one."""
    if len(samples) < 2:
        return float(samples.mean()), None
    return float(samples.mean()), float(samples.std(ddof=1) / math.sqrt(len(samples)))


def with_error(value: float | None, error: float | None, digits: int = 4) -> str:
    """Format a number with its standard error; empty if there is none."""
    if value is None:
        return ""
    return f"{value:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def percent(fraction: float, digits: int = 2) -> str:
    return f"{100 * fraction:.{digits}f} %"
