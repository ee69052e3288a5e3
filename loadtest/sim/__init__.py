"""The simulator bench: the real scheduler in a virtual world, on public traces and made-up workloads.

python -m loadtest.sim SCENARIO [--policy NAME=FUNCTION,...] [--overlap MODE] [--json OUT]
"""
