"""The storage of the tiers: a segment of shared memory for L1, Redis or a folder through LMCache for L2.

interface.py        the protocol of a remote store
arena.py            L1: its size, its arena, the segment of shared memory
lmcache.py          remote stores over LMCache's clients
"""
