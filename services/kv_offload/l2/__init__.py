"""The remote tier: the choice of calls (dispatch.py) and their threads (worker.py)."""
