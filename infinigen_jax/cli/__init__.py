"""Options that command lines share, and the terminal chat.

Imports engine and what it imports. Start reading at options.py.
"""
