"""Start of JAX's backend: environment variables to set before, and the error if it fails."""

import os

import jax

from infinigen_jax.errors import InputError
from infinigen_jax.machine.memory_limits import PINNED_POOL_VARIABLE, available_host_bytes

POOL_SHARE = 0.9  # of the free host memory, for pinned arrays
GPU_SHARE = 0.9  # of a GPU's memory
# Two names of one variable, the second deprecated; JAX refuses both together.
FRACTIONS = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"


def claim_memory() -> None:
    """Let JAX use most of the host's and of a GPU's memory; call it before the backend starts.

    By default XLA pins at most 64 GiB of host memory, and takes three quarters of a GPU's memory.
    Variables that the user has set take precedence.
    """
    pool = max(1, int(POOL_SHARE * available_host_bytes()) >> 30)
    os.environ.setdefault(PINNED_POOL_VARIABLE, str(pool))
    if not any(name in os.environ for name in FRACTIONS):
        os.environ[FRACTIONS[0]] = str(GPU_SHARE)


def start_backend() -> None:
    """Start JAX's backend if it has not started.

    Raise InputError for a device that JAX does not find, or if its numbers have 64 bits.
    """
    if jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        raise InputError(
            "JAX_ENABLE_X64: the programs need JAX's numbers of 32 bits; leave it out, or set "
            '`jax.config.update("jax_enable_x64", False)`'
        )
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # AssertionError if a plugin is missing
        reason = " ".join(str(error).split()).partition(" (set JAX_PLATFORMS")[0]
        raise InputError(
            f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}: JAX finds no such device"
            f"{f' ({reason})' if reason else ''}; install the extra for it (cuda12 or cuda13), or "
            "set JAX_PLATFORMS=cpu"
        ) from None
