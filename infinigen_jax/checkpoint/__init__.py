"""Models on disk: safetensors, torch and GGUF files, Hugging Face layout, conversion manifest.

Imports files, models and what they import. Start reading at source.py.
"""
