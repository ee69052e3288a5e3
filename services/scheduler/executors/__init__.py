"""The executors of a scheduler. moves.py: sequences from one to another; roles.py: among schedulers, and
which of them only prefill; sleep.py."""
