"""Transfer: move requested rows, or weights, from host to device, overlapped with computation.

Imports cache, models and what they import. Start reading at rows.py; host_weights moves weights.

`fetch` is traced into a layer's step, where Python does not run between request and use. The rows
that it returns exist once the transfer has ended; XLA runs other work meanwhile.
"""

from infinigen_jax.transfer.rows import Transfer, make_transfer

__all__ = ["Transfer", "make_transfer"]
