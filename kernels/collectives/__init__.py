"""Columns of which each rank has some, handed out to all ranks."""
