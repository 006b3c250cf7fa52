"""Command line of the figures: `python -m benchmarks.figures kv-size --help`."""

import sys
from collections.abc import Sequence

from benchmarks.figures import chunks, kv_size, long_context, pool, sensitivity, skewing
from infinigen_jax import evaluate

FIGURES = {
    "kv-size": kv_size,
    "chunks": chunks,
    "skewing": skewing,
    "sensitivity": sensitivity,
    "long-context": long_context,
    "pool": pool,
}


def main(argv: Sequence[str] | None = None) -> int:
    summary = "The paper's accuracy figures, through the engine that generates."
    return evaluate.main(argv, FIGURES, "python -m benchmarks.figures", summary)


if __name__ == "__main__":
    sys.exit(main())
