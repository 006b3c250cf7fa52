"""Model folders on disk: safetensors, torch files, Hugging Face layout, the manifest of a
conversion.

Imports speculation, skew, models, text, files. Start reading at hf_folder.py.
"""
