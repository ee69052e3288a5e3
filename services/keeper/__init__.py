"""Keeper: durable requests. It stores a request before it is answered, and its answer before it is forgotten.

records.py     the two messages of the store: work that waits, and the record of its end
core.py        work in flight: events in, commands out
verbs.py       what users ask: submit, result, cancel
queues.py      whose work is pulled next: tenants take turns
actor.py       the shell: the streams, the pull loop, requests to tokenizers
"""
