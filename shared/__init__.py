"""The code that all services share.

messages.py, codec.py      the wire
actor/, nats/              the runtime of an actor, and its transport
api.py                     the public request
client/, replies.py        the native API from the client's side, and the last message to a client
kv_blocks.py               keys of KV blocks, block arithmetic, the rendezvous hash
vocab/                     model files, tokenization and detokenization
telemetry/                 traces and metrics
config.py, errors.py       settings, typed errors
clock.py, processes.py     time; ports, logits processors' names, logs
step_model.py              the predicted time of a step
"""
