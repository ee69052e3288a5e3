"""Kills and stops every service under load and counts wrong, lost and refused answers.

cells.py             one cell: a fresh fleet, a fault, and the counts
__main__.py          the whole matrix, `python -m loadtest.chaos`
"""
