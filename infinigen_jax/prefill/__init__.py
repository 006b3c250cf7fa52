"""Prefill: prompts are read in chunks, and earlier rows are streamed from the host.

Imports decode and what it may import. Start reading at prefill.py.
"""
