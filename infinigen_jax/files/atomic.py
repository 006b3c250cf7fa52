"""Atomic files and folders: they appear whole or not at all, even if the process is killed.

A writer locks its destination with `.NAME.lock`, so writers of one destination take turns. It
writes a hidden sibling, `.NAME.partial-XXXX`, flushes it to disk and renames it to the destination.
The next writer removes a sibling that a killed writer left.
"""

import contextlib
import ctypes
import errno
import glob
import os
import shutil
import signal
import stat
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock

from infinigen_jax.errors import InputError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM)
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)
_WORKING_DIRECTORY, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of Linux


@contextlib.contextmanager
def locked(lock: Path, wait: bool = True) -> Iterator[None]:
    """Hold a lock file and remove it afterwards.

    The file is removed while it is locked. A waiting process notices that the file it opened has
    lost its name, and opens the new one (filelock since 3.24.3). After a kill the file stays until
    the next writer; its mode lets another user be that writer. Raise OSError if the lock file
    cannot be created, or another process holds it and `wait` is False.
    """
    os.stat(lock.parent)  # filelock would create it
    with FileLock(lock, mode=0o666, blocking=wait):
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                lock.unlink()


@contextlib.contextmanager
def whole_file(destination: Path, wait: bool = True) -> Iterator[BinaryIO]:
    """Open a file for writing that becomes `destination` if the block ends without an exception.

    An earlier file stays unchanged until then, and a failure leaves nothing. The new file has its
    permissions. The folder must exist. `wait` is that of `locked`.
    """
    with _writing(destination, wait) as partial:
        try:
            with open(partial, "xb") as file:
                with contextlib.suppress(FileNotFoundError):  # there is no earlier file
                    os.fchmod(file.fileno(), stat.S_IMODE(destination.stat().st_mode))
                yield file
                file.flush()
                os.fsync(file.fileno())
                os.rename(partial, destination)
        finally:  # by then, a complete file has its own name
            with contextlib.suppress(OSError):
                os.unlink(partial)
        _sync_folder(destination.parent)


def write_if_possible(destination: Path, content: bytes) -> None:
    """Write a file and its folder, whole or not at all; do without it where that fails."""
    with contextlib.suppress(OSError):
        destination.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(destination, wait=False) as file:
            file.write(content)


@contextlib.contextmanager
def staged(destination: Path) -> Iterator[Path]:
    """Create a temporary folder that becomes `destination` if the block ends without an exception.

    An earlier folder stays until the new one replaces it. Parents are created. Ctrl-C, SIGTERM and
    SIGHUP inside the block remove the temporary folder, like any failure. The destination is locked
    inside the block.
    """
    created = [parent for parent in destination.parents if not parent.exists()]
    with on_termination():
        try:
            destination.parent.mkdir(parents=True, exist_ok=True)
            with _writing(destination) as folder:
                try:
                    folder.mkdir()
                    yield folder
                    _publish(folder, destination)
                finally:  # by then, a published folder has its own name
                    shutil.rmtree(folder, ignore_errors=True)
        except OSError as error:
            if error.errno in _FULL:
                why = "the disk is full; free some space or choose another"
            else:
                why = f"cannot be written ({error.strerror or error}); choose another folder"
            raise InputError(f"{destination}: {why}") from error
        finally:
            for parent in created:
                with contextlib.suppress(OSError):  # empty only after a failure
                    parent.rmdir()


@contextlib.contextmanager
def _writing(destination: Path, wait: bool = True) -> Iterator[Path]:
    """Lock a destination, remove leftovers of killed writers, and yield the name of a sibling."""
    with locked(destination.with_name(f".{destination.name}.lock"), wait):
        remove_partial(destination)
        yield destination.with_name(f".{destination.name}.partial-{uuid.uuid4().hex[:8]}")


def remove_partial(destination: Path) -> None:
    """Remove leftovers of killed writers; the caller must hold the destination's lock."""
    for leftover in destination.parent.glob(glob.escape(f".{destination.name}.partial-") + "*"):
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a small file inside a staged folder and flush it to disk."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def copy_file(source: BinaryIO, destination: Path) -> None:
    """Copy an open file, with its permissions, and flush the copy to disk."""
    mode = os.fstat(source.fileno()).st_mode & 0o666
    with open(destination, "wb", opener=lambda path, flags: os.open(path, flags, mode)) as written:
        shutil.copyfileobj(source, written)
        written.flush()
        os.fsync(written.fileno())


def link_or_copy(source: Path, destination: Path) -> None:
    """Link a file under a second name, or copy it if the file system or permissions forbid that."""
    try:
        os.link(source.resolve(), destination)
    except OSError:
        with open(source, "rb") as content:
            copy_file(content, destination)


def _publish(folder: Path, destination: Path) -> None:
    """Rename a folder into place; remove an earlier one only afterwards."""
    _sync_folder(folder)
    if not destination.exists():
        os.rename(folder, destination)
    elif not _exchange(folder, destination):  # a kill between the two steps loses both folders
        aside = folder.with_name(f"{folder.name}-earlier")
        os.rename(destination, aside)
        os.rename(folder, destination)
        shutil.rmtree(aside, ignore_errors=True)
    _sync_folder(destination.parent)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step; return False where the system or file system cannot."""
    swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if swap is None:
        return False
    directory, names = _WORKING_DIRECTORY, (os.fsencode(first), os.fsencode(second))
    if swap(directory, names[0], directory, names[1], _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(second))


def _exit(signal_number: int, frame: object) -> None:
    raise SystemExit(128 + signal_number)


@contextlib.contextmanager
def on_termination(handler: Any = _exit) -> Iterator[None]:
    """Handle SIGTERM and SIGHUP, by default with SystemExit, so that clean-up code runs.

    Existing handlers stay.
    """
    main = threading.current_thread() is threading.main_thread()
    with contextlib.ExitStack() as stack:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if main and signal.getsignal(number) is signal.SIG_DFL:
                stack.callback(signal.signal, number, signal.signal(number, handler))
        yield


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, if its file system and permissions allow that."""
    try:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
