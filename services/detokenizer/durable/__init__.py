"""Requests that outlive their reader or all services. The table of the actor names the shell.

attach.py        another reader for a running request, from a character on
savepoints.py   when the tokens of a durable request are stored
shell.py         requests to attach; savepoints on their way to stream HR_STATE and back
"""
