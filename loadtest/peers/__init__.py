"""Other servers beside this one, on the same weights, by the same client, in one run (docs/peers.md).

smollm2.toml   how each is started, and in smollm2_settings.toml what else it was tried with
export.py      the weights of a GGUF file for servers that read folders
server.py      a server as a process     turns.py   the turns: who, in which order, and what came of it
ratios.py      from turns to ratios
"""
