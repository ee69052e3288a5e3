"""The simulator runs the real scheduler in a virtual world: engines with a step-time formula, a detokenizer,
clients and a clock that jumps from event to event. Results are those of a model of the machine, never
measurements.

world.py     the events, and all counterparts of the scheduler
engine.py    a virtual executor, with copies.py, hops.py and fences.py
requests.py  the requests of clients; readers.py records their answers, report.py computes the figures
tiers.py     the protocol of a kv_offload; tier_side.py wakes it, kv_virtual.py is one without bytes
replay/      event logs, replayed
command.py   `headrace replay`
"""
