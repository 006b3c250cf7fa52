"""Selection: from speculated scores to the cache slots that are fetched (section 4.3 of the paper).

Imports ops. Start reading at select.py.
"""
