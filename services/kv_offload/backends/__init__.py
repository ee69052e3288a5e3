"""Where the bytes lie: LMCache or a segment of our own for L1, Redis through LMCache for L2.

interface.py        what an arena and a remote store must do
arena.py            how large L1 is and who keeps it
lmcache.py          LMCache's arena and remote clients
builtin.py          an arena and a remote store without LMCache
shared_memory.py    the arena's shared-memory segment
"""
