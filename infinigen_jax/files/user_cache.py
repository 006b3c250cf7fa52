"""Folders of the user's cache: conversions, CUDA kernels, and compiled programs."""

import contextlib
import errno
import functools
import hashlib
import os
import platform
from pathlib import Path

import jax
import platformdirs

LIMIT = 1 << 30  # bytes of compiled programs
WORTH_KEEPING = 0.2  # seconds of compilation that justify an entry
CPU_INFO = Path("/proc/cpuinfo")
KIND_OF_CPU = ("model name", "flags", "CPU part", "Features")  # the last two of Arm


def cache_root() -> Path:
    """Return the user's cache folder of this package, which may not exist.

    Raise OSError if the user has no home folder, as in containers, and no absolute XDG_CACHE_HOME.
    """
    with contextlib.suppress(RuntimeError):  # newer platformdirs raise it without a home
        root = platformdirs.user_cache_path("infinigen_jax", appauthor=False)
        if root.is_absolute():
            return root
    raise FileNotFoundError(errno.ENOENT, "the user has no home folder for the cache")


def program_folder() -> Path | None:
    """Return the folder of compiled programs, created if necessary; None if none can be used.

    The variables of JAX's cache apply: JAX_COMPILATION_CACHE_DIR names another folder, and
    JAX_ENABLE_COMPILATION_CACHE=0, or its setting in `jax.config`, turns the cache off. A folder
    of another user, or that all can write to, is not used, since its files are pickles; nor is one
    in a cloud.
    """
    if not jax.config.jax_enable_compilation_cache:  # pyright: ignore[reportAttributeAccessIssue]
        return None
    given = os.environ.get("JAX_COMPILATION_CACHE_DIR", "")
    if "://" in given:
        return None
    try:
        folder = Path(given) if given else cache_root() / "programs" / processor()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError:
        return None
    safe = status.st_uid in (0, os.getuid()) and not status.st_mode & 0o002
    return folder if safe and os.access(folder, os.W_OK) else None


def prune_programs() -> None:
    """Remove the least recently used programs beyond LIMIT bytes; spare a folder of the user."""
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        with contextlib.suppress(OSError):
            prune(cache_root() / "programs", LIMIT)


def keep_programs() -> None:
    """Configure JAX to keep compiled programs in the user's cache.

    Only command lines call it, before anything is compiled; a library must not change JAX's
    configuration. It serves commands for which `programs.Program` stores too little or nothing. It
    has no effect if the user has set JAX's variable of the folder.
    """
    if os.environ.get("JAX_COMPILATION_CACHE_DIR") or (folder := program_folder()) is None:
        return
    prune_programs()
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", WORTH_KEEPING)


@functools.cache
def processor() -> str:
    """Return a name for machines with the same instructions, because home folders may be shared."""
    lines = {x for x in cpu_info(CPU_INFO).splitlines() if x.startswith(KIND_OF_CPU)}
    text = platform.machine() + "".join(sorted(lines))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def cpu_info(file: Path) -> str:
    """Return the text of CPU_INFO, empty if this is not Linux."""
    try:
        return file.read_text()
    except OSError:
        return ""


def prune(folder: Path, limit: int) -> None:
    """Remove the least recently used files until the others take `limit` bytes."""
    kept = 0
    files = []
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):  # another process may remove the file
            stat = file.stat()
            if not file.is_file():
                continue
            files.append((max(stat.st_atime, stat.st_mtime), stat.st_size, file))
    for _, size, file in sorted(files, reverse=True):
        kept += size
        if kept > limit:
            with contextlib.suppress(OSError):
                file.unlink()
