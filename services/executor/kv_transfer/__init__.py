"""These modules copy KV blocks between device memory and the host's arena while steps run."""
