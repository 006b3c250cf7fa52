"""Limits of memory: of the host, of a device, and of JAX's pool of pinned host memory."""

import ctypes
import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from infinigen_jax.errors import InputError

PINNED_POOL_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
PINNED_POOL_DEFAULT_GB = 64
_pinned = 0  # most bytes of pinned arrays so far: JAX never returns them to the system


def available_host_bytes(root: Path = Path("/")) -> int:
    """Return the host memory that can be allocated without swapping, in bytes.

    On Linux this is the least of the kernel's estimate (MemAvailable), the room left by this
    process's control groups, as in a container, and the room in its address space. On other systems
    it is the size of the physical memory.
    """
    available = _statistic(root / "proc/meminfo", "MemAvailable:", 1024)
    if available is None:
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, min([available, *_control_group_rooms(root), *_address_space_room(root)]))


def available_device_bytes(device: Any) -> int | None:
    """Return the bytes JAX can still allocate on a device (CPU: on the host); None if unknown."""
    if device.platform == "cpu":
        return available_host_bytes()
    statistics = device.memory_stats()
    if not statistics or "bytes_limit" not in statistics:
        return None
    return max(0, statistics["bytes_limit"] - statistics.get("bytes_in_use", 0))


def return_freed_memory() -> None:
    """Return freed memory to the system, if the C library is glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc
    if trim is not None:
        trim(0)


def pinned_pool_limit_bytes(device: Any) -> int | None:
    """Return the limit of JAX's pool of pinned host memory, in bytes; None if there is no pool.

    XLA reads the environment variable XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB when it starts. Without the
    variable, the pool of a GPU ends at 64 GiB, however much memory the host has.
    """
    if device.platform == "cpu":
        return None
    text = os.environ.get(PINNED_POOL_VARIABLE) or str(PINNED_POOL_DEFAULT_GB)
    try:
        limit = int(text)
    except ValueError:
        limit = 0
    if limit <= 0:
        raise InputError(f"{PINNED_POOL_VARIABLE}={text}: set it to a positive number of gigabytes")
    return limit << 30


def widen_pool_to(count: int) -> str:
    """Return the remedy for a pool that is smaller than `count` bytes."""
    return f"set {PINNED_POOL_VARIABLE}={-(-count // 2**30) + 2}"


def pinned_bytes_in_use(device: Any) -> int:
    """Return the bytes of this process's arrays in a device's pinned host memory."""
    arrays = (x for x in jax.live_arrays() if x.sharding.memory_kind == "pinned_host")
    # Reading `addressable_shards` would make arrays of shards, which are counted as live, too.
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in arrays
        if device in x.sharding.addressable_devices
    )


def unused_pinned_bytes(device: Any) -> int:
    """Return the bytes that JAX has pinned for earlier arrays, and keeps for further ones."""
    return 0 if device.platform == "cpu" else max(0, _pinned - pinned_bytes_in_use(device))


def note_pinned(device: Any) -> None:
    """Note the pinned arrays of a device, for `unused_pinned_bytes`."""
    global _pinned
    if device.platform != "cpu":
        _pinned = max(_pinned, pinned_bytes_in_use(device))


def tree_bytes(tree: Any) -> int:
    """Return the bytes of a tree's arrays, or of the arrays that its shapes describe."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _address_space_room(root: Path) -> Iterator[int]:
    """Yield the bytes left below the limit of `ulimit -v`, if it is set."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        try:
            pages = int((root / "proc/self/statm").read_text().split()[0])
        except OSError:
            pages = 0
        yield limit - pages * resource.getpagesize()


def _control_group_rooms(root: Path) -> Iterator[int]:
    """Yield the bytes left below the limit of each control group of this process.

    A limit holds for a group and all groups inside it, so this walks up to the mount. The path may
    be the host's and not exist in a container; the mount exists.
    """
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for membership in memberships:
        hierarchy, controllers, path = membership.split(":", 2)
        if hierarchy == "0" and not controllers:  # version 2
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
            prefix = ""
        elif "memory" in controllers.split(","):  # version 1
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            prefix = "total_"
        else:
            continue
        group = mount / path.lstrip("/")
        for directory in (group, *group.parents):
            limit, used = (_read_number(directory / name) for name in names)
            if limit is not None and used is not None:
                file, kinds = directory / "memory.stat", ("active_file", "inactive_file")
                yield limit - used + sum(_statistic(file, prefix + kind) or 0 for kind in kinds)
            if directory == mount:
                break


def _read_number(file: Path) -> int | None:
    """Return the number in a file; None if the file is missing or says "max"."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _statistic(file: Path, name: str, unit: int = 1) -> int | None:
    """Return the value of a line `name value` of a file, in bytes; None if it is missing."""
    try:
        lines = map(str.split, file.read_text().splitlines())
    except OSError:
        return None
    return next((int(line[1]) * unit for line in lines if line[:1] == [name]), None)
