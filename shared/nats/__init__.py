"""The transport: its interface (interface.py), NATS (bus.py), subjects (subjects.py), logins and permissions
(access.py).
"""
