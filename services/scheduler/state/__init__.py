"""What the scheduler knows: requests, queue, blocks, costs, counters. It imports nothing of what decides."""
