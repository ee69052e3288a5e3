"""Weights beside plain numbers in safetensors: GGUF files, fp8, 4 bits (checkpoint/stored.py: the tables)."""
