"""The transport: its interface (interface.py), NATS (bus.py), an in-memory double (memory.py), subjects
(subjects.py), logins and permissions (access.py).
"""
