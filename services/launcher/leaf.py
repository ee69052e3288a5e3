"""The leaf node connection between the nats-server of an edge and a central one, as configuration.

    client ──▶ edge ──generate, cancel, attach, forward, …──▶ centre
                    ◀──────────────── replies ───────────────

Both servers carry the same subjects, and all of them pass such a connection: what belongs to one fleet or to
one store is denied here, by the edge. A client of the edge reaches the centre for a model that the edge does
not serve. What the edge serves itself stays there: tokenizers also get copies of requests for others of their
model, and would answer them a second time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from urllib.parse import SplitResult, parse_qs

from services.launcher.nats_server import ServerLimits, quoted
from shared.errors import SetupError
from shared.nats import access, subjects
from shared.nats.subjects import PUBLIC, STORE, token

PORT = 7422  # of nats-server, for leaf nodes
NO_MODEL = "none"  # the setting `model` of an edge without one
SCHEMES = ("nats-leaf", "tls")
PING_INTERVAL = "5s"  # of an edge: a link that was cut without a word is noticed after two
LOCAL = (
    "hr.>", f"{STORE}.>", "_R.>", f"{access.INBOX}.*.{access.user_of('keeper')}.*", "$JS.>", "$SRV.>",
    *dict.fromkeys(f"{PUBLIC}.{s.split('.')[0]}.>" for s, by, _ in access.PUBLIC if access.LEAF not in by),
    subjects.STATUS,
)  # fmt: skip
WITH_MODELS = (f"{PUBLIC}.files.>", f"{PUBLIC}.batches.>")  # an edge without models uses those of the centre
OF_MODEL = ("generate", "tokenize", "detokenize")


def remote(url: str, models: Iterable[str], *, has_users: bool, account: str = "") -> str:
    """The block of an edge that serves `models`. `url`: of a server, or of several of a cluster, by comma.
    `has_users`: of `headrace auth`; `account`: that of the services, if tenants have accounts. Raises
    SetupError for a URL of another form, and for one with a user where the edge has none."""
    parts, names = access.parts_of(url), tuple(models)
    if not all(map(_is_leaf, parts)):
        raise SetupError(
            f"--leaf {access.shown(url)} is no nats-leaf://host:port: name the leaf port of a server"
        )
    if parts[0].username and not has_users:
        raise SetupError(
            "the central server has credentials, and its services answer only in the name of a tenant: make "
            "credentials for this edge with `headrace auth DIR --tenant NAME`, and start with --auth DIR"
        )
    denied = [*LOCAL, *(WITH_MODELS if names else ())]
    denied += [f"{PUBLIC}.{verb}.*.{token(name)}" for verb in OF_MODEL for name in names]
    ca = parse_qs(parts[0].query).get("ca", [""])[0]
    options = [
        f"urls: {json.dumps([each._replace(query='').geturl() for each in parts])}",
        "ignore_discovered_servers: true",  # a server does not know under which address it was reached
        *([f"account: {json.dumps(account)}"] if account else []),
        *([f"tls {{ ca_file: {quoted(ca)} }}"] if ca else []),
        f"deny_imports: {json.dumps(denied)}",
        f"deny_exports: {json.dumps(denied)}",
    ]
    lines = "".join(f"    {option}\n" for option in options)
    return f"leafnodes {{\n  reconnect: 1\n  remotes: [ {{\n{lines}  }} ]\n}}\n"


def _is_leaf(parts: SplitResult) -> bool:
    try:
        return parts.scheme in SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def limits_of(fleet: str, limits: ServerLimits | None) -> ServerLimits:
    """The limits of the server of an edge, from those with which it would run alone."""
    limits = limits or ServerLimits()
    return replace(limits, ping_interval=PING_INTERVAL, domain=f"edge-{fleet}" if limits.store else "")


def listen(address: str, users: Path | None) -> str:
    """The block of a server that edges connect to at `address`, HOST:PORT. `users`: a folder of `headrace
    auth`. Raises SetupError for another form, without credentials for edges in `users`, and for an address of
    other machines without credentials: a leaf node may do what a service may."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise SetupError(f"--leaves {address!r:.80} is no host:port, like 0.0.0.0:{PORT}")
    if users is None and host not in ("127.0.0.1", "localhost", "[::1]"):
        raise SetupError("edges on other machines need credentials: `headrace auth DIR --leaves`, --auth DIR")
    if users is not None and not (users / access.LEAF).exists():
        raise SetupError(f"there are no credentials for edges: run `headrace auth {users} --leaves`")
    return f"leafnodes {{ listen: {json.dumps(address)} }}\n"
