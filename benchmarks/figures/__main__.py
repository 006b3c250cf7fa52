"""Command line of the figures: `python -m benchmarks.figures kv-size --help`."""

import sys
from collections.abc import Sequence

from benchmarks.figures import chunks, kv_size, long_context, pool, sensitivity, skewing
from infinigen_jax import evaluate

SUMMARY = "The paper's accuracy figures, through the engine that generates."
FIGURES = {
    "kv-size": kv_size,
    "chunks": chunks,
    "skewing": skewing,
    "sensitivity": sensitivity,
    "long-context": long_context,
    "pool": pool,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Make a figure; return the exit status."""
    return evaluate.main(argv, FIGURES, "python -m benchmarks.figures", SUMMARY)


if __name__ == "__main__":
    sys.exit(main())
