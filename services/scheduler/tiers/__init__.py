"""The tiers below device memory, as the scheduler uses them.

state.py    which tiers there are, what has been asked of them and is not answered
link.py     what a copy will take: measured rates, and what is queued
worth.py    what it would cost to compute a block again
asking.py   in which tier is what a waiting sequence needs?
loading.py  bring it up, where that is cheaper than computing it
choosing.py which blocks to copy down, and which to give up
storing.py  copy blocks down before their place is given out, or give them up
fleet.py    tiers come and go
"""
