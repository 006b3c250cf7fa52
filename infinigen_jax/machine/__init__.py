"""Machine: the JAX backend, and the memory of host and device.

Imports errors and what it imports. Start reading at memory_limits.py.
"""
