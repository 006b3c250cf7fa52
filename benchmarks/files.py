"""Writing of result files, and notes on progress."""

import json
import sys
from pathlib import Path
from typing import Any

from infinigen_jax.files.atomic import whole_file

RESULTS = Path(__file__).resolve().parent / "results"


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write a result whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write((json.dumps(result, indent=1) + "\n").encode())


def note(text: str) -> None:
    """Print progress to stderr; stdout is for the result."""
    print(text, file=sys.stderr, flush=True)
