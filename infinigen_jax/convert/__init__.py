"""Conversion of models: read, calibrate, skew and write one layer at a time.

Imports machine, messages, skew, text and what they import. Start reading at pipeline.py,
then job.py.
"""
