"""Result files of the command lines: checked before the work, then written whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any

from infinigen_jax.errors import InputError, ParameterError
from infinigen_jax.files.atomic import whole_file
from infinigen_jax.files.regular import expanded

OPEN = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/")  # names of files that are open


def checked_output(parameter: str, name: str | None) -> Path | None:
    """Return the path of a result file after checking, before the work, that it can be written."""
    if name is None:
        return None
    path = expanded(name)
    open_ = is_open(path)
    written = path if open_ else path.parent
    if path.is_dir() or not (open_ or written.is_dir()) or not os.access(written, os.W_OK):
        raise ParameterError(parameter, "cannot be written; give a file in a writable folder", path)
    return path


def check_replaceable(path: Path) -> None:
    """Raise InputError if a path is neither a regular file nor unused: writing replaces it."""
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: it is not a file; give a name for one")


def is_open(path: Path) -> bool:
    """Whether a path is a pipe, a device or a name of OPEN: written to, but never replaced."""
    named = str(path).startswith(OPEN)
    return path.exists() and not path.is_dir() and (named or not path.is_file())


def write_json(parameter: str, path: Path, record: dict[str, Any]) -> None:
    text = json.dumps(record, indent=2) + "\n"
    try:
        with open(path, "wb") if is_open(path) else whole_file(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise ParameterError(parameter, f"{error.strerror}; nothing was written", path) from None
