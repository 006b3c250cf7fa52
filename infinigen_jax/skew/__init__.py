"""Calibration mathematics: skewed bases (section 4.2 of the paper) and query corrections.

Imports models, errors. Start reading at basis.py.
"""
