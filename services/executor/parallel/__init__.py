"""Ranks of one engine use these modules: collectives, peer memory, split steps, coroutines."""
