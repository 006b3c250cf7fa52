"""The machine: the JAX backend, and how much memory device and host have.

Imports errors. Start reading at memory_limits.py.
"""
