"""Batches of requests, and files for them: a Part of the keeper.

batch_core.py    one batch, from its delivery to its last record
batch_shell.py   the batches of a keeper: their files, lines and records
batch_verbs.py   what users ask about batches and files
"""
