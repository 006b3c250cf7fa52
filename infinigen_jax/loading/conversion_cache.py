"""Conversions in the user's cache, made for folders that were never converted.

    KEY/          a conversion; KEY is a hash of the contents of the files that it was made from
    KEY.lock      held by the process that makes, opens or removes KEY
    hashes.json   contents of large files that were hashed before

A key by content survives what changes no result: a touched or added README, a copy or a moved
folder. Hashing takes a second for each gigabyte, so that the hash of a large file is remembered
with its device, inode, size and times, as git does; a sample of the file would be faster still, but
two checkpoints of a training run may agree in it.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from infinigen_jax.checkpoint.hf_folder import side_files, weight_files
from infinigen_jax.checkpoint.manifest import FORMAT_VERSION, MANIFEST_FILE, file_sha256
from infinigen_jax.convert.defaults import DEFAULT_SKEW
from infinigen_jax.errors import InputError
from infinigen_jax.files.atomic import locked, remove_partial, whole_file
from infinigen_jax.files.regular import read_json
from infinigen_jax.files.user_cache import cache_root

# Counts up when conversions measure more: an earlier version's conversion in the cache is made
# again. A folder that the user converted stays as it is.
REVISION = 3
LIMIT = 64 << 30  # bytes of conversions, without those in use
HASHES = "hashes.json"
LARGE = 16 << 20  # bytes from which on a hash is remembered
MOST_HASHES = 1000
SETTLED = 2.0  # seconds after which a change of a file surely changes its times

_used: dict[Path, int] = {}  # open folders, by path, whose shared locks say that they are in use


@contextlib.contextmanager
def cache_lock(destination: Path) -> Iterator[None]:
    """Let one process convert a source while others that need the conversion wait for it.

    Raises:
        InputError: if the cache cannot be written.
    """
    with contextlib.ExitStack() as stack:
        with _writable(destination.parent):
            destination.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(destination.with_suffix(".lock")))
        yield


def cache_folder(folder: Path) -> Path:
    """Return the place of the conversion of a source folder, named by the source's contents.

    Raises:
        InputError: if a file of the model is missing, or no cache folder is known.
    """
    with _writable():
        root = cache_root()
    settings = {"format": FORMAT_VERSION, "revision": REVISION, "skew": DEFAULT_SKEW}
    files = [folder / "config.json", *weight_files(folder), *side_files(folder)]
    hashes = _Hashes(root / HASHES)
    contents = {file.name: hashes.of(file) for file in files}
    hashes.save()
    key = hashlib.sha256(json.dumps([contents, settings], sort_keys=True).encode())
    return root / key.hexdigest()[:32]


def mark_used(folder: Path) -> None:
    """Protect a conversion from `prune` until the process ends: its tokenizer is read later.

    Call it with the conversion's lock held.
    """
    handle = os.open(folder, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_SH)
    if (earlier := _used.pop(folder, None)) is not None:
        os.close(earlier)  # of a folder that was replaced
    _used[folder] = handle
    with contextlib.suppress(OSError):
        os.utime(folder)


def prune(root: Path, limit: int = LIMIT) -> None:
    """Remove the conversions that were used least recently until the rest take `limit` bytes.

    Those in use stay. So does what killed conversions left, except for what none continues.
    """
    total = 0
    for folder in sorted(_conversions(root), key=_last_use, reverse=True):
        total += sum(_size(file) for file in folder.glob("*"))
        if total > limit or not (folder / MANIFEST_FILE).exists():
            _remove_unused(folder)


class _Hashes:
    """SHA-256 of files, large ones remembered in an index."""

    def __init__(self, index: Path):
        self.index, self.changed = index, False
        try:
            self.known = read_json(index)
        except InputError:  # absent or damaged: hash again
            self.known = {}

    def of(self, file: Path) -> str:
        status = file.stat()
        if status.st_size < LARGE:
            return file_sha256(file)
        # The change time too: tools that copy set the other one back.
        numbers = (status.st_dev, status.st_ino, status.st_size)
        name = " ".join(map(str, (*numbers, status.st_mtime_ns, status.st_ctime_ns)))
        if not isinstance(digest := self.known.get(name), str):
            digest = file_sha256(file)
            if time.time() - max(status.st_mtime, status.st_ctime) > SETTLED:
                self.known[name], self.changed = digest, True
        return digest

    def save(self) -> None:
        """Keep the newest; without a writable cache the next process hashes again."""
        if self.changed:
            newest = dict(list(self.known.items())[-MOST_HASHES:])
            with contextlib.suppress(OSError):
                self.index.parent.mkdir(parents=True, exist_ok=True)
                with whole_file(self.index) as out:
                    out.write(json.dumps(newest).encode())


def _conversions(root: Path) -> list[Path]:
    """The conversions in the cache, and places where killed processes left only a part of one."""
    names = {path.name.removeprefix(".").partition(".")[0] for path in root.glob("*")}
    return [root / name for name in names if len(name) == 32 and not name.strip("0123456789abcdef")]


def _last_use(folder: Path) -> float:
    with contextlib.suppress(OSError):
        return folder.stat().st_mtime
    return 0.0


def _size(file: Path) -> int:
    with contextlib.suppress(OSError):
        return file.stat().st_size
    return 0


def _remove_unused(folder: Path) -> None:
    """Remove a conversion unless some process makes, opens or uses it."""
    with contextlib.suppress(OSError), locked(folder.with_suffix(".lock"), wait=False):
        remove_partial(folder)
        handle = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(handle)


@contextlib.contextmanager
def _writable(folder: Path | None = None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f"{folder}: cannot be written ({error.strerror})" if folder else error.strerror
        raise InputError(
            f"{where}; set XDG_CACHE_HOME, or convert the model with "
            "`python -m infinigen_jax.convert`"
        ) from None
