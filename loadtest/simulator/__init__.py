"""The simulator runs the real scheduler in a virtual world: engines with a step-time formula, a detokenizer,
clients and a clock that jumps from event to event. Results are those of a model of the machine, never
measurements.

world.py     the events, and everybody that the scheduler talks to
engine.py    a virtual executor, with copies.py, hops.py and fences.py
requests.py  what clients ask for; readers.py notes what they get, report.py what a run comes to
tiers.py     what a world needs of a kv_offload; tier_side.py wakes it, kv_virtual.py is one without bytes
replay/      event logs done again
command.py   `headrace replay`
"""
