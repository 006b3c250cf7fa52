"""Prefill: prompts are read in chunks, and prior rows are streamed from the host.

Verification reads drafted tokens likewise, and commits the accepted ones (docs/lossless.md).

Imports decode and what it imports. Start reading at prefill.py.
"""
