"""Ranks of one engine use these modules: collectives, symmetric memory, split steps, coroutines."""
