"""Writing a folder so that it appears whole or not at all.

Files go into a hidden sibling of the destination, are flushed to disk, and the sibling is renamed.
A sibling left by a killed process is recognised by its lock, which died with the process, and is
removed by the next conversion to the same destination.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from infinigen_jax.errors import InputError
from infinigen_jax.manifest import MANIFEST_FILE

_FULL = (errno.ENOSPC, errno.EDQUOT)


def check_destination(source: Path, destination: Path, force: bool) -> Path:
    """Refuse a destination that must not be written; returns it resolved.

    Raises:
        InputError: when it is the source, contains it, exists without `force`, or exists and is
            not a converted folder (`force` replaces conversions, it does not delete other things).
    """
    target, origin = destination.expanduser().resolve(), source.resolve()
    if target == origin:
        raise InputError(f"{destination}: source and destination are the same folder")
    if target in origin.parents:
        raise InputError(f"{destination}: contains the source folder; choose another destination")
    if not target.exists():
        return target
    if not force:
        raise InputError(f"{destination}: already exists; choose another folder or give --force")
    replaceable = target.is_dir() and (
        (target / MANIFEST_FILE).exists() or not any(target.iterdir())
    )
    if not replaceable:
        raise InputError(
            f"{destination}: is not a converted model, so --force does not replace it; "
            "choose another folder"
        )
    return target


def check_space(destination: Path, needed: int) -> None:
    """Raise InputError unless the destination's file system has `needed` bytes free."""
    existing = next(p for p in destination.parents if p.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise InputError(
            f"{destination}: needs {_gigabytes(needed)} of disk space, but only "
            f"{_gigabytes(free)} are free; free some or choose another disk"
        )


@contextlib.contextmanager
def staged(destination: Path) -> Iterator[Path]:
    """A temporary folder that becomes `destination` when the block ends without an exception.

    Ctrl-C and SIGTERM inside the block remove it, like any failure.

    Raises:
        InputError: when the destination cannot be written or the disk is full.
    """
    created = _missing_parents(destination)
    folder: Path | None = None
    finished = False
    with _terminate_as_exception():
        try:
            destination.parent.mkdir(parents=True, exist_ok=True)
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
    """Write a small file and flush it to disk."""
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
    replaced: Path | None = None
    if destination.exists():
        replaced = Path(tempfile.mkdtemp(prefix=_prefix(destination), dir=destination.parent))
        os.rename(destination, replaced / "old")
    try:
        os.rename(folder, destination)
    except BaseException:
        if replaced is not None:
            os.rename(replaced / "old", destination)
        raise
    finally:
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
    _sync_folder(destination.parent)


def _prefix(destination: Path) -> str:
    return f".{destination.name}.partial-"


def _locked_folder(destination: Path) -> tuple[Path, int]:
    folder = Path(tempfile.mkdtemp(prefix=_prefix(destination), dir=destination.parent))
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return folder, lock


def _remove_abandoned(destination: Path) -> None:
    """Remove what earlier, killed conversions left; skip what a living process holds."""
    for leftover in destination.parent.glob(_prefix(destination) + "*"):
        try:
            lock = os.open(leftover, os.O_RDONLY)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(leftover, ignore_errors=True)
        except OSError:
            pass
        finally:
            os.close(lock)


def _missing_parents(path: Path) -> list[Path]:
    """Parents that will have to be created, the innermost first."""
    return [parent for parent in path.parents if not parent.exists()]


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


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
