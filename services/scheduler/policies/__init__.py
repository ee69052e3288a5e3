"""Policies known by name, a file for each kind: see services/scheduler/policy.py."""
