"""Executors as a fleet: roles.py, among schedulers; moves.py, sequences from one to another; roles.py,
which of them only prefill; sleep.py."""
