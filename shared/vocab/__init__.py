"""The text side of a model: its files (files.py), GGUF metadata (gguf.py), the parts of a vocabulary
(vocab_files.py), text to ids and back (vocabulary.py).
"""
