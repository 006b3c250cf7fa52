"""Loading of models; a Hugging Face folder is first converted into the user's cache.

Imports convert, speculation, transfer and what they import. Start reading at load.py.
"""
