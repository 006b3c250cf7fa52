"""Tokenizers, detokenisation and chat templates; no code of a model folder runs.

Imports checkpoint and what it imports. Start reading at tokenizer.py.
"""
