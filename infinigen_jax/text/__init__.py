"""Tokenizers, detokenisation and chat templates; no code of a model folder runs.

Imports files, errors. Start reading at tokenizer.py.
"""
