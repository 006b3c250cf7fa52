"""Models on disk: safetensors, torch and GGUF files, Hugging Face layout, conversion manifest.

Imports speculation, skew, models, files. Start reading at source.py.
"""
