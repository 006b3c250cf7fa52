"""Files and folders that appear whole or not at all, whenever the process is killed.

What is written goes into a hidden sibling of the destination, `.NAME.partial-XXXX`, is flushed to
disk, and takes the destination's place in one rename. A sibling left by a killed process is
recognised by its lock, which died with the process, and is removed by the next writer of the same
destination.
"""

import contextlib
import ctypes
import errno
import fcntl
import glob
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from infinigen_jax.errors import InputError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)
_WORKING_DIRECTORY, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of Linux


@contextlib.contextmanager
def whole_file(destination: Path) -> Iterator[BinaryIO]:
    """A file to write to that becomes `destination` when the block ends without an exception.

    An earlier file of that name is there, unchanged, until then. The folder must exist.

    Raises:
        OSError: when it cannot be written; nothing is left of it.
    """
    _remove_abandoned(destination)
    handle, name = tempfile.mkstemp(prefix=_prefix(destination), dir=destination.parent)
    with os.fdopen(handle, "wb") as file:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield file
            file.flush()
            os.fchmod(handle, 0o666 & ~_umask())  # mkstemp made it private
            os.fsync(handle)
            os.rename(name, destination)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    _sync_folder(destination.parent)


@contextlib.contextmanager
def staged(destination: Path) -> Iterator[Path]:
    """A temporary folder that becomes `destination` when the block ends without an exception.

    A folder that is there before stays until the new one takes its place. Parents are created.
    Ctrl-C and SIGTERM inside the block remove the temporary folder, like any failure.

    Raises:
        InputError: when the destination cannot be written or the disk is full.
    """
    created = [parent for parent in destination.parents if not parent.exists()]
    folder: Path | None = None
    finished = False
    with _terminate_as_exception():
        try:
            destination.parent.mkdir(parents=True, exist_ok=True)
            _restore(destination)
            _remove_abandoned(destination)
            folder, lock = _locked_folder(destination)
            try:
                yield folder
                _publish(folder, destination)
                finished = True
            finally:
                os.close(lock)
        except OSError as error:
            raise _explained(error, destination) from error
        finally:
            if not finished:
                if folder is not None:
                    shutil.rmtree(folder, ignore_errors=True)
                for parent in created:
                    with contextlib.suppress(OSError):
                        parent.rmdir()


def write_text(path: Path, text: str) -> None:
    """Write a small file, inside a staged folder, and flush it to disk."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def copy_file(source: Path, destination: Path) -> None:
    """Copy a file's contents (not its permissions) and flush them to disk."""
    with open(source, "rb") as read, open(destination, "wb") as written:
        shutil.copyfileobj(read, written)
        written.flush()
        os.fsync(written.fileno())


def _publish(folder: Path, destination: Path) -> None:
    """Rename into place; what was there before is removed only afterwards."""
    os.chmod(folder, 0o777 & ~_umask())  # mkdtemp made it private
    _sync_folder(folder)
    if not destination.exists():
        os.rename(folder, destination)
    elif _exchange(folder, destination):
        shutil.rmtree(folder, ignore_errors=True)
    else:
        _replace(folder, destination)
    _sync_folder(destination.parent)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step; False where the system or the file system cannot."""
    swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if swap is None:
        return False
    here, names = _WORKING_DIRECTORY, (os.fsencode(first), os.fsencode(second))
    if swap(here, names[0], here, names[1], _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(second))


def _replace(folder: Path, destination: Path) -> None:
    """In two steps; a kill between them leaves the old folder aside, for `_restore`."""
    aside = _aside(destination)
    os.rename(destination, aside)
    try:
        os.rename(folder, destination)
    except BaseException:
        os.rename(aside, destination)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _restore(destination: Path) -> None:
    """Put back a folder that a process killed in `_replace` had set aside."""
    aside = _aside(destination)
    if not aside.exists():
        return
    if destination.exists():
        shutil.rmtree(aside, ignore_errors=True)
    else:
        os.rename(aside, destination)


def _aside(destination: Path) -> Path:
    return destination.with_name(f".{destination.name}.replaced")


def _prefix(destination: Path) -> str:
    return f".{destination.name}.partial-"


def _locked_folder(destination: Path) -> tuple[Path, int]:
    folder = Path(tempfile.mkdtemp(prefix=_prefix(destination), dir=destination.parent))
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return folder, lock


def _remove_abandoned(destination: Path) -> None:
    """Remove what earlier, killed writers left; skip what a living process holds."""
    for leftover in destination.parent.glob(glob.escape(_prefix(destination)) + "*"):
        try:
            lock = os.open(leftover, os.O_RDONLY)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink()
        except OSError:
            pass
        finally:
            os.close(lock)


def _explained(error: OSError, destination: Path) -> InputError:
    if error.errno in _FULL:
        return InputError(f"{destination}: the disk is full; free some space or choose another")
    reason = error.strerror or str(error)
    return InputError(f"{destination}: cannot be written ({reason}); choose another folder")


@contextlib.contextmanager
def _terminate_as_exception() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that clean-up runs; leave a handler of the program alone."""
    default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not default or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
