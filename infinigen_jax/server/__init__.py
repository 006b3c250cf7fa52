"""Server: requests by HTTP, decoded together.

Imports engine and what it imports. Start reading at scheduler.py; app.py has the HTTP interface.
"""
