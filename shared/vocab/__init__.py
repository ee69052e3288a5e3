"""The text side of a model: its files and GGUF metadata (files.py), vocabularies, text to
ids and back (vocabulary.py).
"""
