"""The KV cache: the pinned host array, row formats, what stays on the device, hot set and pool.

Imports selection, cuda, ops. Start reading at layers.py.
"""
