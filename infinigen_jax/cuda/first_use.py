"""Before their first use on a machine the kernels are checked, once, in a process of their own.

A wrong kernel can end a process, or leave a CUDA context behind that is of no use. That they passed
is remembered by a file in the cache folder, named after all that it may depend on: their code, the
handlers', the GPU, its driver, JAX. A failure is not remembered.
"""

import contextlib
import hashlib
import logging
import os
import platform
import signal
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import jax
from jaxlib.version import __version__ as jaxlib_version

from infinigen_jax.cuda import nvrtc
from infinigen_jax.cuda.driver import INT, CudaError, Driver
from infinigen_jax.files.atomic import whole_file
from infinigen_jax.files.user_cache import cache_root

logger = logging.getLogger(__name__)

SWITCH = "INFINIGEN_JAX_KERNELS"
OFF, UNCHECKED = "0", "unchecked"
CHECK = ("-P", "-m", "infinigen_jax.check_kernels")
LIMIT = 180.0  # seconds; most of what it takes is compilation
CANNOT = 2  # its exit status where it cannot be run
WHAT, ERROR = "the check of the CUDA kernels", "error: "


def failure() -> str | None:
    """Why the kernels must not be used on this process's GPUs, in a line; None where they may.

    Of several GPUs of a kind one is checked.

    Raises:
        CudaError, OSError: the driver or the compiler is not there.
    """
    for kind, device in {d.device_kind: d for d in reversed(jax.local_devices())}.items():
        mark = mark_of(device)
        if mark is not None and os.path.exists(mark):
            continue
        logger.info("the CUDA kernels are checked before their first use on %s", kind)
        if reason := run_check(device.local_hardware_id):
            return reason
        remember(device)
    return None


def mark_of(device: Any) -> Path | None:
    """Return the file that says that a GPU of JAX's passed; None without a cache folder."""
    digest = hashlib.sha256(combination(device).encode()).hexdigest()[:16]
    with contextlib.suppress(OSError):
        return cache_root() / f"checked-{digest}"
    return None


def remember(device: Any) -> None:
    """Leave the mark; where the cache cannot be written, the next process checks again."""
    with contextlib.suppress(OSError, CudaError):
        if (mark := mark_of(device)) is None:
            return
        mark.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(mark) as file:
            file.write(combination(device).encode())


def combination(device: Any) -> str:
    """What a check's outcome depends on, for a GPU of JAX's; a line each."""
    return "\n".join(
        [
            f"GPU {device.device_kind}",
            f"driver's CUDA {Driver().get('cuDriverGetVersion', kind=INT)}",
            f"XLA's {' '.join(device.client.platform_version.split())}",
            f"NVRTC {nvrtc.Nvrtc.load().version}",
            f"jax {jax.__version__}, jaxlib {jaxlib_version}",
            f"Python {platform.python_version()}",
            f"sources {hashlib.sha256(sources()).hexdigest()}",
        ]
    )


def sources() -> bytes:
    """The kernels, what launches and checks them, and what calls them by a host's slots."""
    package = resources.files("infinigen_jax")
    callers = ("check_kernels.py", "transfer/cuda.py", "cache/host_array.py")
    files = [*(package / "cuda").iterdir(), *(package / name for name in callers)]
    named = {file.name: file for file in files if file.name.endswith((".py", ".cu"))}
    return b"\0".join(name.encode() + b"\0" + named[name].read_bytes() for name in sorted(named))


def run_check(ordinal: int) -> str | None:
    """Check one of this process's GPUs, in a process that sees no other; None if it passed."""
    # What this process imports, that one does, and this package wherever it is.
    paths = [*map(os.path.abspath, sys.path), str(Path(__file__).parents[2])]
    environment = os.environ | {
        SWITCH: UNCHECKED,
        "CUDA_VISIBLE_DEVICES": _name(ordinal),
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        # This process has taken most of the GPU's memory.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    environment.pop("JAX_CUDA_VISIBLE_DEVICES", None)  # it would count among those that are left
    try:
        done = subprocess.run(
            [sys.executable, *CHECK],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT,
        )
    except OSError as error:
        return f"{WHAT} cannot be started: {error}; {SWITCH}={UNCHECKED} does without it"
    except subprocess.TimeoutExpired:
        return f"{WHAT} took longer than {LIMIT:g} s; {SWITCH}={OFF} leaves them out"
    if done.returncode == 0:
        return None
    said = _said(done.stdout.decode(errors="replace"), done.returncode)
    if done.returncode == CANNOT:
        return f"{said}; {SWITCH}={UNCHECKED} does without a check"
    return f"{said}; {SWITCH}={OFF} leaves them out"


def _name(ordinal: int) -> str:
    """What CUDA_VISIBLE_DEVICES calls one of those that this process sees."""
    names = list(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))
    return names[ordinal].strip() if ordinal < len(names) else str(ordinal)


def _said(output: str, status: int) -> str:
    """The error that was reported, if one was: libraries may have written more behind it."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
    if errors:
        return errors[-1]
    if status < 0:
        return f"{WHAT} ended with signal {-status} ({signal.strsignal(-status)})"
    return f"{WHAT} ended with status {status}{': ' if lines else ''}{''.join(lines[-1:])}"
