"""The transport: its interface, NATS, an in-memory double, subjects and access."""
