"""Speculation: predict the rows that a layer will attend to (partial query, key index, tail).

Imports cache, models and what they import. Start reading at query.py.
"""
