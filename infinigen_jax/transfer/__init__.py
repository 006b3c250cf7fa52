"""Transfer: move requested rows, or weights, from host to device, overlapped with computation.

Imports cache, models and what they import. Start reading at xla.py. The two transfers of rows are
xla and cuda; host_weights moves weights.

`fetch` is traced into a layer's step, where Python does not run between request and use. The rows
that it returns exist once the transfer has ended; XLA runs other work meanwhile.
"""

from infinigen_jax.transfer.cuda import CudaTransfer, Transfer, make_transfer
from infinigen_jax.transfer.xla import XlaTransfer

__all__ = ["CudaTransfer", "Transfer", "XlaTransfer", "make_transfer"]
