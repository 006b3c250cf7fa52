"""Calibration mathematics: the skewed basis of each KV head (InfiniGen, section 4.2) and the
corrections of a query guessed a layer ahead.

Imports models, errors. Start reading at basis.py.
"""
