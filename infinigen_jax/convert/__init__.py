"""Conversion of models: read, map, calibrate, skew and write one layer at a time.

Imports machine, messages, skew, text and what they import. Start reading at pipeline.py.
"""
