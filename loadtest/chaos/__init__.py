"""Kills and stops every service under load and counts wrong, lost and refused answers.

clients.py           24 clients, half over HTTP, half over NATS, and the outcome of each request
cells.py             one cell: a fresh fleet, a fault, and the counts
__main__.py          the whole matrix, `python -m loadtest.chaos`
"""
