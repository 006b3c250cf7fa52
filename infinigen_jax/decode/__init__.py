"""Decode step: the layer that speculates and attends, and the loop over layers in both schedules.

Imports policies, programs, transfer and what they import. Start reading at layer.py, then steps.py.
"""
