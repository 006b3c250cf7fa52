"""Prefill: prompts are read in chunks, and prior rows are streamed from the host.

Imports decode and the rooms below it. Start reading at prefill.py.
"""
