"""Load a converted model; convert a Hugging Face folder into the user's cache first.

Imports convert, checkpoint. Start reading at load.py.
"""
