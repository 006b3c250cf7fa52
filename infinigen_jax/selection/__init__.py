"""Selection: from speculated scores to the cache slots that are fetched (section 4.3 of the paper).

Imports numeric, ops and what they import. Start reading at select.py.
"""
