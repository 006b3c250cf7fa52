"""Loading of models; a Hugging Face folder is first converted into the user's cache.

Imports convert, checkpoint. Start reading at load.py.
"""
