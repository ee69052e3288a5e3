"""Other servers beside Headrace: same weights, same client, one run (docs/benchmarks/peers.md).

smollm2.toml   the command of each server; smollm2_settings.toml has the other settings that were tried
export.py      the weights of a GGUF file for servers that read folders
server.py      a server as a process     turns.py   the order of the servers, and their results
ratios.py      computes ratios from turns
"""
