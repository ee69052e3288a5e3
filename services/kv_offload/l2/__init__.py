"""The remote tier: its state (state.py), the choice of calls (dispatch.py), and their threads (worker.py)."""
