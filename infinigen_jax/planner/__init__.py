"""Planner of the `plan` command: forecasts of memory and traffic, and recommended settings.

Imports cli and what it imports. Start reading at forecast.py.
"""
