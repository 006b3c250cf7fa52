"""Compiled programs stored on disk, and a count of compilations.

Imports files. Start reading at program.py.
"""
