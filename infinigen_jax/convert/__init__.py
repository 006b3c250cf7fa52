"""Conversion of models: read, map, calibrate, skew and write one layer at a time.

Imports checkpoint, skew, speculation, text, models, files. Start reading at pipeline.py.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infinigen_jax.convert.pipeline import convert

__all__ = ["convert"]


def __getattr__(name: str) -> Any:
    """Import on first use: the command line's --help needs no JAX."""
    if name != "convert":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from infinigen_jax.convert.pipeline import convert

    return convert
