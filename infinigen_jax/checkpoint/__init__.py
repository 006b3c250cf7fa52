"""Model folders on disk: safetensors and torch files, Hugging Face layout, conversion manifest.

Imports speculation, skew, models, files. Start reading at hf_folder.py.
"""
