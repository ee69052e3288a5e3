"""KV offload: the tiers below device memory, DRAM (L1) and remote (L2).

actor.py       the shell: mailbox, core and threads of L2
core.py        events in, commands out
events.py      these events and commands, and deadlines
state.py       the state of the core
l1_cache.py    the index of L1
jobs.py        stores, lookups, loads and leases
l2/            the remote tier
backends/      the memory of L1 and the clients of L2
"""
