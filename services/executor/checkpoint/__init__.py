"""From a checkpoint on disk to weights on the device, and the KV cache beside them."""
