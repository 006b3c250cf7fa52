"""Cache of conversions in the user's cache folder.

KEY/          a conversion; KEY is a hash of its source files' inodes, sizes, times
KEY.lock      held by the process that makes, opens or removes KEY
"""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from infinigen_jax.checkpoint.manifest import FORMAT_VERSION, MANIFEST_FILE
from infinigen_jax.checkpoint.source import content_files
from infinigen_jax.convert.defaults import DEFAULT_SKEW
from infinigen_jax.errors import InputError
from infinigen_jax.files.atomic import locked, remove_partial
from infinigen_jax.files.user_cache import cache_root

# Increases when conversions measure more, which invalidates cached conversions. Folders that the
# user converted stay valid.
REVISION = 4
LIMIT = 64 << 30  # bytes of conversions


@contextlib.contextmanager
def cache_lock(destination: Path) -> Iterator[None]:
    """Hold the lock of a conversion; other processes that need it wait."""
    with contextlib.ExitStack() as stack:
        with _writable(destination.parent):
            destination.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(destination.with_suffix(".lock")))
        yield


def cache_folder(source: Path) -> Path:
    """Return the path of a source's conversion, which is made again if a file may have changed."""
    with _writable():
        root = cache_root()
    contents = {}
    for name, file in content_files(source).items():
        status = file.stat()
        # Tools that copy files restore the modification time, but not the change time.
        times = status.st_mtime_ns, status.st_ctime_ns
        contents[name] = status.st_ino, status.st_size, times
    settings = {"format": FORMAT_VERSION, "revision": REVISION, "skew": DEFAULT_SKEW}
    key = hashlib.sha256(json.dumps([contents, settings], sort_keys=True).encode())
    return root / key.hexdigest()[:32]


def prune(root: Path, limit: int = LIMIT) -> None:
    """Remove the least recently used conversions until the rest take `limit` bytes.

    Partial conversions of killed processes are removed unless another process continues them.
    """
    total = 0
    for folder in sorted(_conversions(root), key=_last_use, reverse=True):
        with contextlib.suppress(OSError):  # another process may remove files
            total += sum(file.stat().st_size for file in folder.glob("*"))
        if total > limit or not (folder / MANIFEST_FILE).exists():
            with contextlib.suppress(OSError), locked(folder.with_suffix(".lock"), wait=False):
                remove_partial(folder)
                shutil.rmtree(folder, ignore_errors=True)


def _conversions(root: Path) -> list[Path]:
    """List the conversions in the cache, including partial ones of killed processes."""
    names = {path.name.removeprefix(".").partition(".")[0] for path in root.glob("*")}
    return [root / name for name in names if len(name) == 32 and not name.strip("0123456789abcdef")]


def _last_use(folder: Path) -> float:
    with contextlib.suppress(OSError):
        return folder.stat().st_mtime
    return 0.0


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
