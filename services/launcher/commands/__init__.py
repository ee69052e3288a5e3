"""The `headrace` commands, one file each; chat.py also holds `request`, status.py also `kv`."""
