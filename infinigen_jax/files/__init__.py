"""Files that appear whole or not at all, checked reading, and the folders of the user's cache.

Imports errors. Start reading at atomic.py.
"""
