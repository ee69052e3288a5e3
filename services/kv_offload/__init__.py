"""KV offload: the tiers below device memory, DRAM (L1) and remote (L2).

actor.py       the shell: mailbox to core, core to mailbox and to the threads of L2
core.py        events in, commands out
events.py      these events and commands, and what is due when
state.py       everything the core knows
l1_cache.py    the index of L1
jobs/          stores, lookups, loads and leases
l2/            the remote tier
backends/      where the bytes lie
"""
