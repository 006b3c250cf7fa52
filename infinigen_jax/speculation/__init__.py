"""Speculation: predict the rows that a layer will attend to (partial query, key index, tail).

Imports cache, skew, selection, models, cuda. Start reading at query.py.
"""
