"""Starting JAX's backend: what has to be set before, and what to say when it does not start."""

import os

import jax

from infinigen_jax.errors import InputError
from infinigen_jax.machine.memory_limits import PINNED_POOL_VARIABLE, available_host_bytes

POOL_SHARE = 0.9  # of the host's free memory, for arrays in pinned memory


def widen_pinned_pool() -> None:
    """Let JAX use most of the host's memory as pinned memory; to be called before it starts.

    XLA takes pinned host memory from a pool that grows up to a limit, 64 GiB unless an environment
    variable, which the user may have set, says otherwise. What is not needed is not taken.
    """
    pool = max(1, int(POOL_SHARE * available_host_bytes()) >> 30)
    os.environ.setdefault(PINNED_POOL_VARIABLE, str(pool))


def start_backend() -> None:
    """Start JAX's backend, if that has not happened.

    Raises:
        InputError: naming JAX_PLATFORMS, if there is no such backend here.
    """
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter for a plugin that is missing
        reason = " ".join(str(error).split()).partition(" (set JAX_PLATFORMS")[0]
        raise InputError(
            f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}: JAX finds no such device"
            f"{f' ({reason})' if reason else ''}; install the extra for it (cuda12 or cuda13), or "
            "set JAX_PLATFORMS=cpu"
        ) from None
