"""What every service is made of: a runtime (runtime.py), a mailbox (mailbox.py), numbered streams (stream.py)
and the fleet's members (membership.py).
"""
