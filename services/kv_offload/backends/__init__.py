"""The storage of the tiers: a segment of shared memory for L1, Redis, or a folder through LMCache, for L2.

interface.py        the protocol of a remote store
arena.py            the size of L1
builtin.py          the arena of L1 in its segment
redis.py            Redis
lmcache.py          which remote store; a folder, over LMCache's client
"""
