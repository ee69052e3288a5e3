"""Event logs done again: compared, and run under another policy in the virtual world."""
