"""Options that command lines share, and the terminal chat.

Imports engine. Start reading at options.py.
"""
