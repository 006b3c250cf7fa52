"""Moving requested rows from host to device. A transfer is one file here."""

from infinigen_jax.errors import InputError
from infinigen_jax.transfer.base import Transfer
from infinigen_jax.transfer.xla import XlaTransfer

TRANSFERS = ("auto", "xla")


def make_transfer(name: str) -> Transfer:
    """The transfer called `name` on the command line: "auto" or "xla"."""
    if name in ("auto", "xla"):
        return XlaTransfer()
    raise InputError(f"--transfer {name}: not available; use auto or xla")


__all__ = ["TRANSFERS", "Transfer", "XlaTransfer", "make_transfer"]
