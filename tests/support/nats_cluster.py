"""Three nats-servers that are one cluster."""

from __future__ import annotations

import json
import socket
from dataclasses import replace

from services.launcher import nats_server
from services.launcher.nats_server import NatsServer, ServerLimits
from shared.nats import access

USER, PASSWORD = "all", "secret"


def free_ports(count: int) -> list[int]:
    """Ports that no process listens on."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


def start_three(*, users: bool = False) -> list[NatsServer]:
    """The servers, with streams on disk; with `users` each connection must have the login."""
    ports = free_ports(3)
    routes = json.dumps([f"nats://127.0.0.1:{port}" for port in ports])
    limits = replace(ServerLimits(), jetstream_memory="16MB", jetstream_file="1GB")
    login = f'authorization {{ user: {USER}, password: "{PASSWORD}" }}' if users else ""
    servers = []
    for number, port in enumerate(ports):
        listen = f'cluster {{ name: c, listen: "127.0.0.1:{port}", routes: {routes} }}'
        extra = f"server_name: n{number}\n{listen}\n{login}\n"
        servers.append(nats_server.start(limits=limits, extra=extra))
    return servers


def url_of(server: NatsServer) -> str:
    """The address with the login."""
    return access.as_user(server.url, USER, PASSWORD)
