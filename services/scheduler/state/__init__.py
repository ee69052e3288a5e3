"""The scheduler's state: requests, queue, blocks, costs, counters. It imports no code that decides."""
