"""Model files as text sees them: where they lie (files.py), GGUF metadata (gguf.py), the parts of a
vocabulary (vocab_files.py), text to ids and back (vocabulary.py).
"""
