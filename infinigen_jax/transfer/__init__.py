"""Transfer: move requested rows from host to device, overlapped with computation.

Imports cache, selection, cuda, ops. Start reading at base.py. Each transfer is one file.
"""

from infinigen_jax.errors import InputError
from infinigen_jax.transfer.base import Transfer
from infinigen_jax.transfer.cuda import CudaTransfer, best_transfer
from infinigen_jax.transfer.xla import XlaTransfer, xla_transfer

TRANSFERS = ("auto", "xla", "cuda")


def make_transfer(name: str) -> Transfer:
    """Return the transfer with this command-line name, one of TRANSFERS.

    "auto" is `cuda` on NVIDIA GPUs. If `cuda` cannot run, a warning states the reason and `xla` is
    used; the results are equal.

    Raises:
        InputError: for another name.
    """
    if name == "xla":
        return xla_transfer()
    if name in TRANSFERS:
        return best_transfer(requested=name == "cuda")
    raise InputError(f"--transfer {name}: not available; use auto, xla or cuda")


__all__ = ["TRANSFERS", "CudaTransfer", "Transfer", "XlaTransfer", "make_transfer"]
