"""What every service shares.

messages.py, codec.py      the wire
actor/, nats/              the runtime of an actor, and the transport below it
client.py, replies.py      the native API from the client's side, and the last message to a client
kv_blocks.py               names of KV blocks, block arithmetic, the rendezvous hash
vocab/                     model files as text sees them
telemetry/                 traces and metrics
config.py, errors.py       settings, typed errors
clock.py, processes.py     time; ports, logits processors' names, logs
step_model.py              how long a step takes
"""
