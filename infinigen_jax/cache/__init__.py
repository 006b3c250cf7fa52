"""KV cache: the pinned host array, row formats, rows on the device, hot set and pool.

Imports cuda, machine, settings and what they import. Start reading at cache.py.
"""
