"""An account of the nats-server for each tenant, as configuration.

    account acme ──stream export: generate.acme.*, cancel.acme.*, …──▶ account headrace-services
                 ◀──stream export: _INBOX.acme.>, done.acme.*──────── (all services and the operator)

Requests are stream exports, too, not service exports: across those the server replaces the reply subject,
forgets the replacement after a silence, and never reports that the reader has gone. A message of a stream
export keeps its reply subject. So the services answer in the tenant's part of the inboxes, and the server's
503 comes at once when the client has gone. The account imports that part twice: under its own name, and as
`_INBOX.>` for clients with the usual inboxes (`shared.nats.access.mapped`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from shared.errors import SetupError
from shared.nats import access
from shared.nats.subjects import token

SERVICES = access.user_of("services")  # the account of the services; no tenant has such a name
LIMITS = ("connections", "subscriptions", "payload", "jetstream")
MOST, MOST_BYTES = 2**31 - 1, 2**50  # nats-server cuts larger numbers down to 32 bits
_SIZE = re.compile(r"(\d{1,9})(|KB|MB|GB)")
_BYTES = {"": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}

Limits = Mapping[str, int]  # by a name of LIMITS; `payload` and `jetstream` in bytes


def limits_of(text: str) -> Limits:
    """The limits of an account: `connections=20,payload=1MB`. Raises SetupError."""
    limits = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, value = part.partition("=")
        size = _SIZE.fullmatch(value)
        number = int(size[1]) * _BYTES[size[2]] if size is not None else 0
        if name not in LIMITS or not 0 < number <= (MOST_BYTES if name == "jetstream" else MOST):
            raise SetupError(
                f"{part!r:.80} is no limit of an account: write NAME=NUMBER, with a name of "
                f"{', '.join(LIMITS)}; a number may end with KB, MB or GB"
            )
        limits[name] = number
    return limits


def block(services: Iterable[str], tenants: Mapping[str, tuple[str, Limits]]) -> str:
    """The block `accounts` of a server's configuration. `services`: the entries of the users of all services;
    `tenants`: the entry and the limits of each tenant, by its name."""
    exports, imports = [], []
    accounts = []
    for tenant, (user, limits) in sorted(tenants.items()):
        name, may = token(tenant), access.of_tenant(tenant)
        exports += [_export(subject, name) for subject in may.subscribe]
        imports += [_import(subject, name) for subject in may.publish]
        usual = {"to": f"{access.INBOX}.>"}
        own = [_import(subject, SERVICES) for subject in may.subscribe]
        own += [_import(f"{access.INBOX}.{name}.{access.MAPPED}.>", SERVICES) | usual]
        asks = [_export(subject, SERVICES) for subject in may.publish]
        accounts.append(_account(name, [user], _lines(limits), asks, own))
    return "\n".join(
        ["accounts {", _account(SERVICES, services, ["jetstream: enabled"], exports, imports), *accounts, "}"]
    )


def _account(name: str, users: Iterable[str], lines: list[str], exports: Any, imports: Any) -> str:
    both = (("exports", exports), ("imports", imports))
    crossing = [line for kind, entries in both for line in (f"{kind}: [", *map(json.dumps, entries), "]")]
    return "\n".join([f"  {json.dumps(name)}: {{", *lines, "users: [", *users, "]", *crossing, "  }"])


def _lines(limits: Limits) -> list[str]:
    most = {f"max_{name}": number for name, number in limits.items() if name != "jetstream"}
    files = {"max_mem": 0, "max_file": limits.get("jetstream", 0)}
    return [
        *([f"limits: {json.dumps(most)}"] if most else []),
        f"jetstream: {json.dumps(files) if files['max_file'] else 'disabled'}",
    ]


def _export(subject: str, reader: str) -> dict[str, Any]:
    return {"stream": subject, "accounts": [reader]}


def _import(subject: str, account: str) -> dict[str, Any]:
    return {"stream": {"account": account, "subject": subject}}
