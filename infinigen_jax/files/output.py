"""Result files of the command lines: checked before the work, then written whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any

from infinigen_jax.errors import ParameterError
from infinigen_jax.files.atomic import whole_file


def checked_output(parameter: str, name: str | None) -> Path | None:
    """Return the path of a result file after checking, before the work, that it can be written."""
    if name is None:
        return None
    path = Path(name)
    pipe = path.exists() and not path.is_file() and not path.is_dir()  # or /dev/stdout
    written = path if pipe else path.parent
    if path.is_dir() or not (pipe or written.is_dir()) or not os.access(written, os.W_OK):
        raise ParameterError(parameter, "cannot be written; give a file in a writable folder", path)
    return path


def write_json(parameter: str, path: Path, record: dict[str, Any]) -> None:
    text = json.dumps(record, indent=2) + "\n"
    try:
        if path.exists() and not path.is_file():  # never replace /dev/stdout or a pipe
            path.write_text(text, encoding="utf-8")
            return
        with whole_file(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise ParameterError(parameter, f"{error.strerror}; nothing was written", path) from None
