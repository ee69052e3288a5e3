"""One file for each `headrace` command."""
