"""The simulator bench: the real scheduler in a virtual world, on public traces and made-up workloads.

python -m loadtest.scenarios SCENARIO [--policy NAME=FUNCTION,...] [--overlap MODE] [--json OUT]
"""
