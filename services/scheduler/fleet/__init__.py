"""Executors as a fleet: division.py, among schedulers; moves.py, sequences from one to another; sleep.py."""
