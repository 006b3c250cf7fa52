"""Calibration mathematics: skewed bases (section 4.2 of the paper) and query corrections.

Imports models and what it imports. Start reading at basis.py.
"""
