"""The file of a saved conversation, protected by a checksum.

It is a safetensors file with the tensors

    record      all values that are not arrays, as JSON in bytes
    ...         the arrays, see `snapshot`
    checksum    [32] SHA-256 of all bytes before it
"""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from infinigen_jax.checkpoint.safetensors import SafetensorsFile, SafetensorsWriter
from infinigen_jax.errors import InputError
from infinigen_jax.files.atomic import whole_file

KIND = "infinigen-jax conversation"
VERSION = 2
BYTES = np.dtype(np.uint8)
CHECKSUM_BYTES = hashlib.sha256().digest_size
# Errors caused by invalid values.
_WRONG = (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError)

Layout = Mapping[str, tuple[np.dtype, tuple[int, ...]]]


def check_replaceable(path: Path) -> None:
    """Raise InputError if a path is neither a regular file nor unused, since saving replaces it."""
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: it is not a file; give a name for one")


def write_saved(
    path: Path,
    record: dict[str, Any],
    layout: Layout,
    arrays: Iterable[tuple[str, np.ndarray]],
) -> None:
    """Write a file completely, with one array in memory at a time, or raise an InputError."""
    check_replaceable(path)
    text = json.dumps({"kind": KIND, "version": VERSION} | record).encode()
    text += b" " * (-len(text) % 64)  # keeps the arrays aligned
    whole = {"record": (BYTES, (len(text),)), **layout, "checksum": (BYTES, (CHECKSUM_BYTES,))}
    try:
        with whole_file(path) as file:
            writer = SafetensorsWriter(file, whole)
            writer.add("record", np.frombuffer(text, BYTES))
            for name, array in arrays:
                writer.add(name, array)
            writer.add("checksum", np.frombuffer(writer.digest, BYTES))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; nothing was written") from None


class SavedFile:
    """A file written by `write_saved`; raises InputError if missing, damaged or another kind."""

    def __init__(self, path: Path):
        self.path = path
        if not path.is_file():
            problem = "not a file" if path.exists() else "no such file"
            raise InputError(f"{path}: {problem}; give a saved conversation")
        try:
            self._file = SafetensorsFile(path)
        except InputError:
            raise self.refused("not a saved conversation, or damaged") from None
        names = list(self._file.tensors)
        if not names or (names[0], names[-1]) != ("record", "checksum"):
            raise self.refused("not a saved conversation")
        self._check_sum()
        self.record = self._read_record()

    def read(self, name: str, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        """Return a read-only view of an array; raise InputError if its dtype or shape differs."""
        info = self._file.tensors.get(name)
        if info is None or info.shape != shape or info.dtype != dtype:
            raise self.refused("its arrays do not fit the model and the settings")
        return self._file.read(name)

    @contextlib.contextmanager
    def interpreting(self) -> Iterator[None]:
        """Convert errors caused by an invalid record into an InputError."""
        try:
            yield
        except InputError:
            raise
        except _WRONG:
            raise self.refused("not a saved conversation") from None

    def refused(self, why: str) -> InputError:
        return InputError(f"{self.path}: {why}; give a saved conversation")

    def _check_sum(self) -> None:
        info = self._file.tensors["checksum"]
        with memoryview(self._file.content) as content:
            digest = hashlib.sha256(content[: info.begin]).digest()
        if self._file.read("checksum").tobytes() != digest:
            raise self.refused("damaged, its checksum does not fit")

    def _read_record(self) -> dict[str, Any]:
        with self.interpreting():
            record = json.loads(self._file.read("record").tobytes())
            kind, version = record["kind"], record["version"]
            if kind != KIND:
                raise ValueError
            if version != VERSION:
                raise self.refused(
                    f"it has format version {version}, but version {VERSION} is needed"
                )
            return record
        raise AssertionError  # for the type checker: `interpreting` suppresses no error
