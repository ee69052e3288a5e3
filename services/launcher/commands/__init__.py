"""The `headrace` commands; submit.py also has `result` and `attach`, status.py `top`, `kv` and `usage`."""
