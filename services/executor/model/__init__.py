"""A model described once: its numbers, its operations, and how an engine takes them."""
