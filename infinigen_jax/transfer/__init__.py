"""Moving requested rows from host to device. A transfer is one file here."""

from infinigen_jax.errors import InputError
from infinigen_jax.transfer.base import Transfer
from infinigen_jax.transfer.cuda import CudaTransfer, best_transfer
from infinigen_jax.transfer.xla import XlaTransfer, xla_transfer

TRANSFERS = ("auto", "xla", "cuda")


def make_transfer(name: str) -> Transfer:
    """The transfer called `name` on the command line: one of TRANSFERS.

    "auto" is `cuda` on NVIDIA GPUs. Where that one cannot run, a warning says why and `xla` does
    its work: the results are the same.

    Raises:
        InputError: for another name.
    """
    if name == "xla":
        return xla_transfer()
    if name in TRANSFERS:
        return best_transfer(wanted=name == "cuda")
    raise InputError(f"--transfer {name}: not available; use auto, xla or cuda")


__all__ = ["TRANSFERS", "CudaTransfer", "Transfer", "XlaTransfer", "make_transfer"]
