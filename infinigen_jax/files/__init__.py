"""Atomic files and folders, checked reading, and the folders of the user's cache.

Imports errors and what it imports. Start reading at atomic.py.
"""
