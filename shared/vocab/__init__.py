"""The text side of a model: its files (files.py), GGUF metadata (gguf.py), vocabularies, text to
ids and back (vocabulary.py).
"""
