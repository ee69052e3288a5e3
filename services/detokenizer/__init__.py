"""Detokenizer: turns token ids into text, finds stop strings, owns the reply streams."""
