"""The storage of the tiers: a segment of shared memory for L1, Redis or a folder for L2.

interface.py        the protocol of a remote store, and the table of stores
arena.py            L1: its size, its arena, the segment of shared memory
lmcache.py          Redis over LMCache's client
folder.py           a folder of files as a remote store, with a limit
"""
