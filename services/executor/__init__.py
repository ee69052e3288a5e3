"""The executor computes the plans of its scheduler on one engine."""
