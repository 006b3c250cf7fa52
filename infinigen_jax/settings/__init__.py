"""Settings of engine, policies, pool and sampling, with their defaults, help and checks.

Imports numeric and what it imports; never JAX, so that command lines report a bad option
immediately. Start reading at setting.py.
"""
