"""Finished measurements, kept next to the result file, so that an interrupted command can resume.

Each configuration has one file, named by a hash of everything that its numbers depend on. The
folder is removed when the result file is written.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from infinigen_jax.errors import InputError
from infinigen_jax.files.atomic import whole_file
from infinigen_jax.files.output import is_open


class Measurement(NamedTuple):
    """Raw arrays of a configuration, the basis of statistics, and entries of the result."""

    arrays: dict[str, np.ndarray]
    values: dict[str, Any]


class Parts:
    """Finished measurements of a run that may be interrupted.

    Args:
        output: result file; parts lie in a folder of its name with the suffix ".parts". None keeps
            nothing.
        key: everything that all configurations have in common, ready for JSON.
    """

    def __init__(self, output: Path | None, key: dict[str, Any]):
        keeps = output is not None and not is_open(output)
        self.folder = output.with_name(f"{output.name}.parts") if output and keeps else None
        self.key = key

    def load(self, settings: dict[str, Any]) -> Measurement | None:
        """Return the measurement with these settings; None if missing or unreadable."""
        path = self._file(settings)
        if path is None or not path.is_file():
            return None
        try:
            # Open the file here, because `np.load` leaves a damaged file open.
            with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in stored.files}
                return Measurement(arrays, json.loads(str(arrays.pop("values"))))
        except Exception:  # a damaged archive can raise nearly anything
            return None  # it is measured again

    def save(self, settings: dict[str, Any], measured: Measurement) -> None:
        """Write a measurement, whole or not at all."""
        path = self._file(settings)
        if path is None:
            return
        try:
            path.parent.mkdir(exist_ok=True)
            with whole_file(path) as file:
                values: Any = {"values": np.array(json.dumps(measured.values))}
                np.savez(file, **(measured.arrays | values))
        except OSError as error:
            raise InputError(f"{path.parent}: {error.strerror}; make room") from None

    def remove(self) -> None:
        """Remove all parts once the result is written."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _file(self, settings: dict[str, Any]) -> Path | None:
        text = json.dumps([self.key, settings], sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:24]
        return self.folder and self.folder / f"{name}.npz"
