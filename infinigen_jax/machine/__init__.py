"""Machine: the JAX backend, and the memory of host and device.

Imports errors. Start reading at memory_limits.py.
"""
