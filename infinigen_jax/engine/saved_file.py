"""A saved conversation as a file, read only if every byte of it is as it was written.

It is a safetensors file of

    record      all that is not an array, as JSON in bytes
    ...         the arrays, see `snapshot`
    checksum    [32] SHA-256 of everything before it in the file
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
VERSION = 1
BYTES = np.dtype(np.uint8)
CHECKSUM_BYTES = hashlib.sha256().digest_size
# What comes of values that are not what they should be.
_WRONG = (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError)

Layout = Mapping[str, tuple[np.dtype, tuple[int, ...]]]


def check_replaceable(path: Path) -> None:
    """Refuse a device or a pipe, whose place a saved conversation would take.

    Raises:
        InputError: naming --save.
    """
    if path.exists() and not path.is_file():
        raise InputError(f"--save {path}: it is not a file; give a name for one")


def write_saved(
    path: Path,
    record: dict[str, Any],
    layout: Layout,
    arrays: Iterable[tuple[str, np.ndarray]],
) -> None:
    """Write a file whole or not at all; of the arrays, one at a time is needed.

    Args:
        record: of JSON values.
        layout: dtype and shape of each array, in order.

    Raises:
        InputError: if it cannot be written.
    """
    check_replaceable(path)
    text = json.dumps({"kind": KIND, "version": VERSION} | record).encode()
    text += b" " * (-len(text) % 64)  # keeps the arrays aligned
    whole = {"record": (BYTES, (len(text),)), **layout, "checksum": (BYTES, (CHECKSUM_BYTES,))}
    try:
        with whole_file(path) as file, SafetensorsWriter(file, whole) as writer:
            writer.add("record", np.frombuffer(text, BYTES))
            for name, array in arrays:
                writer.add(name, array)
            writer.add("checksum", np.frombuffer(writer.digest, BYTES))
    except OSError as error:
        raise InputError(f"--save {path}: {error.strerror}; nothing was written") from None


class SavedFile:
    """A file that `write_saved` wrote.

    Attributes:
        record: what was written.

    Raises:
        InputError: if it is missing, damaged or of another kind.
    """

    def __init__(self, path: Path):
        self.path = path
        if not path.is_file():
            raise InputError(f"--resume {path}: no such file; give one that --save wrote")
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
        """A read-only view of one of the arrays.

        Raises:
            InputError: if it is not of that dtype and shape.
        """
        info = self._file.tensors.get(name)
        if info is None or info.shape != shape or info.dtype != dtype:
            raise self.refused("what is saved does not fit the model and the settings")
        return self._file.read(name)

    @contextlib.contextmanager
    def interpreting(self) -> Iterator[None]:
        """Refuse the file if what is in the record is not what it should be."""
        try:
            yield
        except InputError:
            raise
        except _WRONG:
            raise self.refused("not a saved conversation") from None

    def refused(self, why: str) -> InputError:
        return InputError(f"--resume {self.path}: {why}; give a file that --save wrote")

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
                raise self.refused(f"it has format version {version}, but {VERSION} is read")
            return record
        raise AssertionError  # for the type checker: `interpreting` swallows nothing
