"""Array operations independent of caches and models: attention, top-k, compaction.

Imports errors. Start reading at attention.py.
"""
