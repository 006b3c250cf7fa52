"""Conversion of models: read, map, calibrate, skew and write one layer at a time.

Imports checkpoint, skew, speculation, text, models, files. Start reading at pipeline.py.
"""
