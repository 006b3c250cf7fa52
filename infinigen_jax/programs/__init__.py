"""Compiled programs that are kept on disk, and a count of compilations.

Imports files. Start reading at program.py.
"""
