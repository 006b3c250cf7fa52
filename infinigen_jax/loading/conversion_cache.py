"""Cache of conversions in the user's cache folder, and verification of any conversion.

    KEY/          a conversion; KEY is a hash of the contents of its source files
    KEY.lock      held by the process that makes or removes KEY
    hashes.json   hashes of large files, by device, inode, size and times

A content key survives a touched or added README, a copy, and a moved folder. Hashing takes a second
per gigabyte, so hashes of large files are remembered, as git does. A hash of a sample would be
faster, but two checkpoints of one training run may agree in the sample.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from infinigen_jax.checkpoint.manifest import (
    AGAIN,
    DEFAULT_SKEW,
    FORMAT_VERSION,
    MANIFEST_FILE,
    Manifest,
    file_sha256,
)
from infinigen_jax.checkpoint.source import content_files, is_gguf
from infinigen_jax.errors import InputError
from infinigen_jax.files.atomic import locked, remove_partial, write_if_possible
from infinigen_jax.files.regular import read_json
from infinigen_jax.files.user_cache import cache_root
from infinigen_jax.text import gguf_tokenizer

# Increases when a conversion's measurements change, which invalidates cached conversions. Folders
# that the user converted stay valid.
REVISION = 7
LIMIT = 64 << 30  # bytes of conversions
HASHES = "hashes.json"
LARGE = 16 << 20  # bytes of the smallest file whose hash is remembered
MOST_HASHES = 1000
SETTLED = 2.0  # seconds after which a change surely alters a file's times


@contextlib.contextmanager
def cache_lock(destination: Path, notify: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a conversion; other processes that need it say so and wait."""
    with contextlib.ExitStack() as stack:
        with usable(destination.parent):
            destination.parent.mkdir(parents=True, exist_ok=True)
            lock = destination.with_suffix(".lock")
            try:
                stack.enter_context(locked(lock, wait=False))
            except TimeoutError:
                notify("waiting for another process, which converts this model")
                stack.enter_context(locked(lock))
        yield


class UnknownHashError(Exception):
    """The hash of a large file is not remembered."""


def cache_folder(source: Path, *, read_large: bool = True) -> Path:
    """Return the path of a source's conversion, named by the source's contents.

    Large files whose hash is not remembered are read, or UnknownHashError is raised.
    """
    with usable():
        root = cache_root()
    settings = {"format": FORMAT_VERSION, "revision": REVISION, "skew": DEFAULT_SKEW}
    if is_gguf(source):  # a conversion holds the tokenizer that this module reads
        settings["tokenizer"] = file_sha256(Path(gguf_tokenizer.__file__))
    contents = _hashes(content_files(source), read_large=read_large)
    key = hashlib.sha256(json.dumps([contents, settings], sort_keys=True).encode())
    return root / key.hexdigest()[:32]


def verify_files(folder: Path, manifest: Manifest) -> None:
    """Compare the size and SHA-256 of a conversion's files with the manifest."""
    paths = {name: folder / name for name in manifest.files}
    for name in {"generation_config.json"} - manifest.files.keys():
        if os.path.lexists(folder / name):
            raise InputError(f"{folder / name}: not of this conversion; remove it, or {AGAIN}")
    for name, path in paths.items():
        if not path.is_file():
            raise InputError(f"{path}: missing; {AGAIN}")
        size, expected = path.stat().st_size, manifest.files[name]["size"]
        if size != expected:
            raise InputError(f"{path}: {size} bytes instead of {expected}; {AGAIN}")
    hashes = _hashes(paths)
    for name, path in paths.items():
        if hashes[name] != manifest.files[name]["sha256"]:
            raise InputError(f"{path}: damaged, its SHA-256 is not the recorded one; {AGAIN}")


@contextlib.contextmanager
def usable(folder: Path | None = None) -> Iterator[None]:
    """Explain errors of a cache folder that cannot be used."""
    try:
        yield
    except OSError as error:
        where = f"{folder}: " if folder else ""
        raise InputError(
            f"{where}{str(error.strerror).lower()}; set XDG_CACHE_HOME to a folder of yours, "
            "or convert the model with `python -m infinigen_jax.convert`"
        ) from None


def known_conversion(source: Path) -> Path | None:
    """Return the path of a source's conversion in the cache, without reading large files.

    None without one, or if the source lacks files, or if the hash of a large one is not remembered.
    """
    with contextlib.suppress(InputError, OSError, UnknownHashError):
        folder = cache_folder(source, read_large=False)
        if (folder / MANIFEST_FILE).exists():
            return folder
    return None


def prune(root: Path, limit: int = LIMIT) -> None:
    """Remove the least recently used conversions until the rest take `limit` bytes.

    Partial conversions of killed processes are removed unless another process continues them.
    """
    names = {path.name.removeprefix(".").partition(".")[0] for path in root.glob("*")}
    folders = [root / name for name in names if re.fullmatch("[0-9a-f]{32}", name)]
    total = 0
    for folder in sorted(folders, key=_last_use, reverse=True):
        with contextlib.suppress(OSError):  # another process may remove files
            total += sum(file.stat().st_size for file in folder.glob("*"))
        if total > limit or not (folder / MANIFEST_FILE).exists():
            with contextlib.suppress(OSError), locked(folder.with_suffix(".lock"), wait=False):
                remove_partial(folder)
                shutil.rmtree(folder, ignore_errors=True)


def _hashes(files: Mapping[str, Path], *, read_large: bool = True) -> dict[str, str]:
    """Return the SHA-256 of files; those of large ones are remembered in the cache, if any."""
    index, known = None, {}
    with contextlib.suppress(OSError, InputError):  # without an index or with a damaged one
        index = cache_root() / HASHES
        known = read_json(index)
    hashes, new = {}, {}
    now = time.time()
    for role, file in files.items():
        status = file.stat()
        # Includes the change time, because tools that copy files restore the modification time.
        numbers = (status.st_dev, status.st_ino, status.st_size)
        name = " ".join(map(str, (*numbers, status.st_mtime_ns, status.st_ctime_ns)))
        if isinstance(digest := known.get(name), str):
            hashes[role] = digest
            continue
        if status.st_size >= LARGE and not read_large:
            raise UnknownHashError
        hashes[role] = file_sha256(file)
        settled = now - max(status.st_mtime, status.st_ctime) > SETTLED
        if settled and status.st_size >= LARGE:
            new[name] = hashes[role]
    if new and index is not None:
        newest = dict(list((known | new).items())[-MOST_HASHES:])
        write_if_possible(index, json.dumps(newest).encode())
    return hashes


def _last_use(folder: Path) -> float:
    with contextlib.suppress(OSError):
        return folder.stat().st_mtime
    return 0.0
