"""Sampling, grammars and logits processors choose tokens from logits."""
