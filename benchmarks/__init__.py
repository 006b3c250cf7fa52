"""Measurements, each a module: `python -m benchmarks.decode`. Results are kept in `results/`."""
