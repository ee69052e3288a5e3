"""The remote tier: what is known of it (state.py), what is asked of it (dispatch.py), and the threads that
carry it (worker.py).
"""
