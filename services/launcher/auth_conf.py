"""Users and permissions as the configuration of a nats-server; passwords only as bcrypt hashes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

from services.launcher.nats_server import ServerLimits
from shared.errors import SetupError
from shared.permissions import Permissions

# The passwords are 256 random bits, which no work factor could make harder to guess; the least one keeps the
# return of a whole fleet after a restart of the server from costing it seconds.
BCRYPT_ROUNDS = 4
ANSWER_WITHIN = "1m"
HEAD = "# made by `headrace auth`: "


@dataclass(frozen=True, slots=True)
class User:
    """Who may connect, and what for."""

    password: str
    permissions: Permissions


@dataclass(frozen=True, slots=True)
class Tls:
    """Files that the server reads: its certificate and its key."""

    certificate: str
    key: str


def users_conf(users: Mapping[str, User]) -> str:
    """The block `authorization` for these users; its first line tells whether it is still up to date."""
    body = [_user(name, user) for name, user in sorted(users.items())]
    return "\n".join([head(users), "authorization {", "  users: [", *body, "  ]", "}", ""])


def head(users: Mapping[str, User]) -> str:
    """The first line of `users_conf`: equal for equal users, passwords and permissions."""
    facts = json.dumps([[name, repr(user)] for name, user in sorted(users.items())])
    return HEAD + sha256(facts.encode()).hexdigest()[:32]


def server_conf(tls: Tls | None, limits: ServerLimits) -> str:
    """A server of its own machine or container, which includes `users.conf` from the same folder."""
    files = f"cert_file: {json.dumps(tls.certificate)}, key_file: {json.dumps(tls.key)}" if tls else ""
    return "\n".join(
        [
            HEAD + "what the server allows, and who may connect",
            "port: 4222",
            "http_port: 8222",
            *limits.lines(),
            'jetstream { store_dir: "/data", max_mem: 64MB, max_file: 1GB }',
            *([f"tls {{ {files} }}"] if tls else []),
            "include ./users.conf",
            "",
        ]
    )


def _user(name: str, user: User) -> str:
    p = user.permissions
    allowed = [f"publish: {{ allow: {_list(p.publish)} }}", f"subscribe: {{ allow: {_list(p.subscribe)} }}"]
    if p.answers:
        allowed.append(f'allow_responses: {{ max: 1, expires: "{ANSWER_WITHIN}" }}')
    rights = ",\n        ".join(allowed)
    return (
        f"    {{ user: {json.dumps(name)}, password: {json.dumps(_hashed(user.password))},\n"
        f"      permissions: {{\n        {rights} }} }}"
    )


def _list(patterns: tuple[str, ...]) -> str:
    return json.dumps(list(patterns))


def _hashed(password: str) -> str:
    try:
        import bcrypt
    except ModuleNotFoundError:
        raise SetupError("credentials need the package bcrypt: pip install bcrypt") from None
    # the server takes the older name of the same algorithm only
    return bcrypt.hashpw(password.encode(), bcrypt.gensalt(BCRYPT_ROUNDS, prefix=b"2a")).decode()
