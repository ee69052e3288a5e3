"""Launcher: the command `headrace`; `headrace up` runs every service as a process."""
