"""Array operations that know nothing of caches or models: attention, top-k, compaction.

Imports errors. Start reading at attention.py.
"""
