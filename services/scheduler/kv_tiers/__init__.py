"""The scheduler keeps KV blocks in the tiers below device memory, and brings them back from there.

lookups.py  in which tier is what a waiting group needs? And what all jobs have in common
load.py     bring it up, where that is cheaper than computing it
store.py    which blocks to copy down, and copying them before their place is given out
hosts.py    tiers come and go

What is known of tiers and copies: ../state/transfers.py. What computing a block again costs:
../recompute_cost.py.
"""
