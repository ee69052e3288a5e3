"""The storage of the tiers: LMCache or our own segment for L1, Redis through LMCache for L2.

interface.py        the protocols of an arena and a remote store
arena.py            the size and the backend of L1
lmcache.py          LMCache's arena and remote clients
builtin.py          an arena and a remote store without LMCache; the shared-memory segment of arenas
"""
