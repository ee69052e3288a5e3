"""Tokenizer: the public edge. Validates requests and turns text into token ids."""
