"""From scores to the cache slots that are fetched (InfiniGen, section 4.3).

Imports ops. Start reading at select.py.
"""
