"""Writing of result files, and notes on progress."""

import json
import os
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write a result whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(partial, path)


def note(text: str) -> None:
    """Print progress to stderr; stdout is for the result."""
    print(text, file=sys.stderr, flush=True)
