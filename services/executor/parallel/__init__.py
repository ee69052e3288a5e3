"""What ranks of one engine share: collectives, memory of peers, split steps, coroutines."""
