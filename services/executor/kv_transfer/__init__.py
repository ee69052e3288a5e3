"""Copies of KV blocks between device memory and the host's arena, beside the steps."""
