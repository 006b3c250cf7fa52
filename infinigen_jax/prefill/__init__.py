"""Reading prompts chunk by chunk, earlier rows streamed from the host.

Imports decode and what it may import. Start reading at prefill.py.
"""
