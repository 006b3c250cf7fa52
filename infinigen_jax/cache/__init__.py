"""KV cache: the pinned host array, row formats, rows on the device, hot set and pool.

Imports selection, cuda, ops, machine. Start reading at cache.py.
"""
