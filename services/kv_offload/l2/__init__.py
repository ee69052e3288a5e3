"""The remote tier: what is known of it, what is asked of it, and the threads that carry it."""
