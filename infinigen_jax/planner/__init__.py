"""Planner of the `plan` command: forecasts of memory and traffic, and recommended settings.

Imports cli, engine, loading and lower rooms. Start reading at forecast.py.
"""
