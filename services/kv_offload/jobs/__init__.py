"""What executors and schedulers ask of L1: stores, loads, leases."""
