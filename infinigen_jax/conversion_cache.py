"""The user's cache of conversions: where one is kept, and one process at a time that makes it."""

import contextlib
import fcntl
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from infinigen_jax.convert import DEFAULT_SKEW
from infinigen_jax.errors import InputError
from infinigen_jax.manifest import FORMAT_VERSION
from infinigen_jax.user_cache import cache_root

# Counts up when conversions measure more: what an earlier version left in a cache, which nobody
# asked for, is made again. A folder that was asked for stays as good as it was.
REVISION = 3


@contextlib.contextmanager
def cache_lock(destination: Path) -> Iterator[None]:
    """Let one process convert a source while others that want it too wait for the result."""
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        lock = open(destination.with_suffix(".lock"), "w")
    except OSError as error:
        raise InputError(
            f"{destination.parent}: cannot be written ({error.strerror}); set XDG_CACHE_HOME, or "
            "convert the model with `python -m infinigen_jax.convert`"
        ) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def cache_folder(folder: Path) -> Path:
    """Where the conversion of a source folder is kept: a name that changes with the source."""
    files = [
        (f.name, f.stat().st_size, f.stat().st_mtime_ns)
        for f in sorted(folder.iterdir())
        if f.is_file()
    ]
    settings = {
        "format": FORMAT_VERSION,
        "revision": REVISION,
        "skew": DEFAULT_SKEW,
        "folder": str(folder.resolve()),
    }
    key = hashlib.sha256(json.dumps([files, settings]).encode()).hexdigest()[:32]
    return cache_root() / key
