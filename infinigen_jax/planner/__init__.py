"""Forecasts for `plan`: memory, traffic, and the settings that it recommends.

Imports cli, engine. Start reading at forecast.py.
"""
