"""Prefill: prompts are read in chunks, and prior rows are streamed from the host.

Imports decode and what it imports. Start reading at prefill.py.
"""
