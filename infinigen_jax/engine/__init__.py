"""The engine: prompts in, tokens out; batches, conversations, memory plans, statistics.

Imports loading, prefill, sampling and what they import. Start reading at engine.py.
"""
