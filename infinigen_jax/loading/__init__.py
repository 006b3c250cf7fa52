"""Loading of models; a Hugging Face folder is first converted into the user's cache.

Imports convert, transfer, text, checkpoint, machine, files. Start reading at load.py.
"""
