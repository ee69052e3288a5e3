"""What every service shares: wire messages, codec, subjects, bus, actor runtime, configuration."""
