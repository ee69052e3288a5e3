"""The `headrace` commands, one file each; chat.py also has `request`, status.py also `top` and `kv`."""
