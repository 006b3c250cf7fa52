"""Transfer: move requested rows from host to device, overlapped with computation.

Imports cache, selection, cuda, ops. Start reading at base.py. Each transfer is one file.
"""

from infinigen_jax.transfer.base import Transfer
from infinigen_jax.transfer.cuda import CudaTransfer, make_transfer
from infinigen_jax.transfer.xla import XlaTransfer

__all__ = ["CudaTransfer", "Transfer", "XlaTransfer", "make_transfer"]
