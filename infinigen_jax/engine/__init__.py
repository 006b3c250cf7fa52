"""The engine: prompts in, tokens out; batches, conversations, memory plans, statistics.

Imports loading, prefill, decode. Start reading at engine.py.
"""
