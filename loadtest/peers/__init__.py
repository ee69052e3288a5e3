"""Other servers beside this one: same weights, same client, one run (docs/benchmarks/peers.md).

smollm2.toml   how each is started, and in smollm2_settings.toml what else it was tried with
export.py      the weights of a GGUF file for servers that read folders
server.py      a server as a process     turns.py   the turns: who, in which order, and what came of it
ratios.py      from turns to ratios
"""
