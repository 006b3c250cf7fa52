"""Array operations independent of caches and models: attention, top-k, compaction.

Imports nothing of the package. Start reading at attention.py.
"""
