"""Blocks in L1 of other hosts: lookups and leases (book.py), threads (wire.py), the transport (nixl.py)."""
