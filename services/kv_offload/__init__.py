"""KV offload: the tiers below device memory, DRAM (L1) and remote (L2)."""
