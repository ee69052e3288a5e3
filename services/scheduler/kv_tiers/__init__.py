"""The tiers below device memory, as the scheduler uses them.

lookups.py  in which tier is what a waiting sequence needs?
load.py     bring it up, where that is cheaper than computing it
store.py    which blocks to copy down, and copying them before their place is given out
hosts.py    tiers come and go

What is known of tiers and copies: ../state/transfers.py. What computing a block again costs:
../recompute_cost.py.
"""
