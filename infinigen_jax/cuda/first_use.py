"""Check of the kernels before their first use on a machine, once, in a separate process.

A wrong kernel can end a process or leave an unusable CUDA context. A file in the cache folder marks
success. Its name depends on what may affect the outcome: the code of the kernels, of their launch
and of the check, the GPU, its driver, JAX. A failure leaves no mark.
"""

import contextlib
import hashlib
import logging
import os
import platform
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import jax
from jaxlib.version import __version__ as jaxlib_version

from infinigen_jax.cuda import nvrtc
from infinigen_jax.cuda.launch import driver_version
from infinigen_jax.files.atomic import write_if_possible
from infinigen_jax.files.user_cache import cache_root

logger = logging.getLogger(__name__)

SWITCH = "INFINIGEN_JAX_KERNELS"
OFF, UNCHECKED = "0", "unchecked"
CHECK = ("-P", "-m", "infinigen_jax.check_kernels")
LIMIT = 180.0  # seconds, mostly compilation
CANNOT = 2  # exit status of a check that cannot run
WHAT, ERROR = "the check of the CUDA kernels", "error: "


def failure() -> str | None:
    """Return why this GPU must not use the kernels, or None; OSError without driver or NVRTC."""
    device = jax.local_devices()[0]
    mark = mark_of(device)
    if mark is not None and os.path.exists(mark):
        return None
    logger.info("the CUDA kernels are checked before their first use on %s", device.device_kind)
    if not (reason := run_check()):
        remember(device)
    return reason


def mark_of(device: Any) -> Path | None:
    """Return the file that marks a successful check of a GPU; None without a cache folder."""
    digest = hashlib.sha256(combination(device).encode()).hexdigest()[:16]
    with contextlib.suppress(OSError):
        return cache_root() / f"checked-{digest}"
    return None


def remember(device: Any) -> None:
    """Write the mark; if the cache cannot be written, the next process checks again."""
    with contextlib.suppress(OSError):
        if (mark := mark_of(device)) is not None:
            write_if_possible(mark, combination(device).encode())


def combination(device: Any) -> str:
    """Return lines that identify what may affect a check's outcome."""
    lines = [
        f"GPU {device.device_kind}",
        f"driver's CUDA {driver_version()}",
        f"XLA's {' '.join(device.client.platform_version.split())}",
        f"NVRTC {nvrtc.Nvrtc.load().version}",
        f"jax {jax.__version__}, jaxlib {jaxlib_version}",
        f"Python {platform.python_version()}",
        f"sources {hashlib.sha256(sources()).hexdigest()}",
    ]
    return "\n".join(lines)


def sources() -> bytes:
    """Return the code of the kernels, of their launch and of the check, and of modules they use."""
    package = resources.files("infinigen_jax")
    callers = ("check_kernels.py", "transfer/rows.py", "cache/host_array.py", "ops/attention.py")
    files = [*(package / "cuda").iterdir(), *(package / name for name in callers)]
    named = {file.name: file for file in files if file.name.endswith((".py", ".cu"))}
    return b"\0".join(name.encode() + b"\0" + named[name].read_bytes() for name in sorted(named))


def run_check() -> str | None:
    """Check the first GPU in another process; return None on success, else the reason."""
    # The worker imports from the same folders as this process, and this package in any case.
    paths = [*map(os.path.abspath, sys.path), str(Path(__file__).parents[2])]
    environment = os.environ | {
        SWITCH: UNCHECKED,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        # This process has already reserved most of the GPU's memory.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    try:
        completed = subprocess.run(
            [sys.executable, *CHECK],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT,
        )
    except OSError as error:
        return f"{WHAT} cannot be started: {error}; {SWITCH}={UNCHECKED} skips it"
    except subprocess.TimeoutExpired:
        return f"{WHAT} took longer than {LIMIT:g} s; {SWITCH}={OFF} turns the kernels off"
    status = completed.returncode
    if status == 0:
        return None
    lines = completed.stdout.decode(errors="replace").splitlines()
    # Libraries may have written more after the error.
    errors = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
    said = errors[-1] if errors else f"{WHAT} ended with status {status}: {' '.join(lines[-1:])}"
    remedy = f"{UNCHECKED} skips the check" if status == CANNOT else f"{OFF} turns the kernels off"
    return f"{said}; {SWITCH}={remedy}"
