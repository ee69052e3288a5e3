"""The scheduler stores KV blocks in the tiers below device memory, and loads them from there.

lookups.py  which kv_offload has the blocks of a waiting group; the start and end of all jobs
load.py     load blocks, if that is faster than computing them
store.py    which blocks to copy down before they are given out, and the end of all copies

Its kv_offloads join and leave in ../recovery.py. The state is in ../state/transfers.py, the time to compute a
block again in ../preemption.py.
"""
