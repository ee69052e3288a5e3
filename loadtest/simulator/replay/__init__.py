"""Event logs replayed: compared, and simulated under another policy in the virtual world."""
