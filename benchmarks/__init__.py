"""Benchmarks, one module each: `python -m benchmarks.decode`. Results lie in `results/`."""
