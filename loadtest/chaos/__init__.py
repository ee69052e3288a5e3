"""Every service killed and stopped in the middle of load, and what clients see (`python -m loadtest.chaos`).

clients.py           24 clients, half over HTTP, half over NATS, and what becomes of each request
cells.py             a fault, a fresh fleet under it, and the count of what must not be
__main__.py          the whole matrix
"""
