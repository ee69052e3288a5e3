"""What executors and schedulers ask of L1: store.py, load.py (lookups, too) and leases.py."""
