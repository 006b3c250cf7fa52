"""Decode step: the layer that speculates and attends, and the loop over layers in both schedules.

Imports policies, transfer, cache, speculation, programs. Start reading at layer.py, then steps.py.
"""
