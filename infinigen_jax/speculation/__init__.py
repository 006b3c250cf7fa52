"""Guess what a layer will attend to: the partial query, the index of keys, and the tail.

Imports cache, skew, selection, models, cuda. Start reading at query.py.
"""
