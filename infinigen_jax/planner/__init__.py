"""Planner of the `plan` command: forecasts of memory and traffic, and recommended settings.

Imports cli, engine. Start reading at forecast.py.
"""
