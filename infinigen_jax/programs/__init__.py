"""Compiled programs stored on disk, and a count of compilations.

Imports files and what it imports. Start reading at program.py.
"""
