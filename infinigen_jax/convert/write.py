"""Checks of a conversion's destination, made before any work."""

import shutil
from pathlib import Path

from infinigen_jax.checkpoint.manifest import MANIFEST_FILE
from infinigen_jax.errors import InputError
from infinigen_jax.files.regular import expanded
from infinigen_jax.machine.memory_limits import format_bytes


def check_destination(source: Path, destination: Path, force: bool) -> Path:
    """Refuse a destination that must not be written; return its resolved path.

    Raises:
        InputError: the destination is the source, contains it, exists without `force`, or exists
            and is not a converted folder, which `force` does not replace.
    """
    target, origin = expanded(destination).resolve(), source.resolve()
    if target == origin:
        raise InputError(f"{destination}: source and destination are the same folder")
    if target in origin.parents:
        raise InputError(f"{destination}: contains the source folder; choose another destination")
    if not target.exists():
        return target
    if not force:
        raise InputError(f"{destination}: already exists; choose another folder or give `force`")
    replaceable = target.is_dir() and (
        (target / MANIFEST_FILE).exists() or not any(target.iterdir())
    )
    if not replaceable:
        raise InputError(
            f"{destination}: is not a converted model, so `force` does not replace it; "
            "choose another folder"
        )
    return target


def check_space(destination: Path, needed: int) -> None:
    """Raise InputError unless the destination's file system has `needed` bytes free."""
    existing = next(p for p in destination.parents if p.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise InputError(
            f"{destination}: needs {format_bytes(needed)} of disk space, but only "
            f"{format_bytes(free)} are free; free some or choose another disk"
        )
