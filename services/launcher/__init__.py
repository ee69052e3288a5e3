"""Launcher: the command `headrace`; `headrace up` runs every service as a process.

cli.py            the command line
up.py             `headrace up`: nats-server, services, readiness
serve.py          one service as one process, and its health check
supervisor.py     service processes kept running
heartbeats.py          whether a service lives; the health check
own_folder.py     temporary files, swept when their owner has died
nats_server.py    the embedded nats-server
session.py        which server and model a client command means
console.py        what people read
commands/         the other verbs
"""
