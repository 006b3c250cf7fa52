"""Transfer: move requested rows from host to device, overlapped with computation.

Imports cache, selection, cuda, ops. Start reading at base.py. Each transfer is one file.
"""

from infinigen_jax.settings.engine import EngineOptions
from infinigen_jax.settings.setting import check_setting
from infinigen_jax.transfer.base import Transfer
from infinigen_jax.transfer.cuda import CudaTransfer, best_transfer
from infinigen_jax.transfer.xla import XlaTransfer, xla_transfer


def make_transfer(name: str) -> Transfer:
    """Return the transfer with this command-line name, one of `settings.engine.TRANSFERS`.

    "auto" is `cuda` on NVIDIA GPUs. If `cuda` cannot run, a warning states the reason and `xla` is
    used; the results are equal.

    Raises:
        InputError: for another name.
    """
    check_setting(EngineOptions, "transfer", name)
    return xla_transfer() if name == "xla" else best_transfer(requested=name == "cuda")


__all__ = ["CudaTransfer", "Transfer", "XlaTransfer", "make_transfer"]
