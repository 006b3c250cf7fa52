"""Settings of policies, pool and sampling: default, help and check of each stand here alone.

Imports errors and numeric; never JAX, so that command lines report a bad option immediately. Start
reading at setting.py.
"""
