"""Server: requests by HTTP, decoded together. It uses the engine and rooms below it.

Start with `scheduler.py`; `app.py` has the HTTP interface.
"""
