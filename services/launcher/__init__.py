"""Launcher: the command `headrace`; `headrace up` runs every service as a process.

cli.py            the command line
up.py             `headrace up`: nats-server, services, readiness
background.py     the fleet that `headrace run` starts, and its end
serve.py          one service as one process
supervisor.py     starts, restarts and drains service processes
fork_server.py    a process that has imported what services share; its forks become services
heartbeats.py     finds services that hang; the health check of a container
own_folder.py     temporary files, removed when their owner has died; the logs of services
nats_server.py    the embedded nats-server, and the folder in which it keeps durable requests
credentials.py    what `headrace auth` has made
joining.py        whether this host may join a fleet; which GPUs each executor sees
host_agent.py     models that load and wake on this host
session.py        the server and model of a client command
console.py        terminal output
commands/         the other commands
"""
