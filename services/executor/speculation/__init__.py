"""Drafts of tokens, found by the executor."""
