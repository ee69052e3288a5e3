"""`headrace auth` makes the credentials of every service and tenant, and the nats-server's configuration.

    DIR/nats/nats.conf, users.conf        for the server: users, hashed passwords, permissions
    DIR/tokenizer/headrace.toml, ...      for one service each: `nats_url` with its user and password
    DIR/gateway/keys                      for the gateway: the hashes of the API keys
    DIR/tokenizer/classes                 for the tokenizers: the service classes that a tenant may use
    DIR/nats/accounts                     once there was a run with `--accounts`: the limits of each account
    DIR/leaf/headrace.toml                for the nats-servers of edges, once there was a run with `--leaves`
    DIR/operator/headrace.toml, api_key   for the operator: the command line, and over HTTP /metrics
    DIR/tenants/NAME/headrace.toml        for one tenant each, for NATS
    DIR/tenants/NAME/api_key              and for HTTP

Each user has its own folder, which can be handed over without the others. A second run keeps every password,
adds missing files and updates the server's files; `--force` makes new passwords for every user. The server's
files hold passwords only as bcrypt hashes. With `--accounts` each tenant has an account of the server instead
of a user with permissions (services/launcher/commands/auth.py).

An account of the nats-server for each tenant, as configuration.

    account acme ──stream export: generate.acme.*, cancel.acme.*, …──▶ account headrace-services
                 ◀──stream export: _INBOX.acme.>, done.acme.*──────── (all services and the operator)

Requests are stream exports, too, not service exports: across those the server replaces the reply subject,
forgets the replacement after a silence, and never reports that the reader has gone. A message of a stream
export keeps its reply subject. So the services answer in the tenant's part of the inboxes, and the server's
503 comes at once when the client has gone. The account imports that part twice: under its own name, and as
`_INBOX.>` for clients with the usual inboxes (`shared.nats.access.mapped`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from services.launcher import credentials
from services.launcher.console import load, print_line
from services.launcher.credentials import ACCOUNTS, API_KEY, CLASSES, FILE, KEYS, SERVICES_ACCOUNT, TENANTS
from services.launcher.leaf import PORT
from services.launcher.nats_server import ServerLimits, quoted
from shared.config import DEFAULT_NATS_URL
from shared.errors import SetupError
from shared.nats import access, permissions
from shared.nats.permissions import Permissions
from shared.nats.subjects import DEFAULT_TENANT, token, untoken

LIMIT_NAMES = ("connections", "subscriptions", "payload", "jetstream")
MOST, MOST_BYTES = 2**31 - 1, 2**50  # nats-server cuts larger numbers down to 32 bits
_SIZE = re.compile(r"(\d{1,9})(|KB|MB|GB)")
_BYTES = {"": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}

Limits = Mapping[str, int]  # by a name of LIMITS; `payload` and `jetstream` in bytes


def read_limits(text: str) -> Limits:
    """The limits of an account: `connections=20,payload=1MB`. Raises SetupError."""
    limits = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, value = part.partition("=")
        size = _SIZE.fullmatch(value)
        number = int(size[1]) * _BYTES[size[2]] if size is not None else 0
        if name not in LIMIT_NAMES or not 0 < number <= (MOST_BYTES if name == "jetstream" else MOST):
            raise SetupError(
                f"{part!r:.80} is no limit of an account: write NAME=NUMBER, with a name of "
                f"{', '.join(LIMIT_NAMES)}; a number may end with KB, MB or GB"
            )
        limits[name] = number
    return limits


def accounts_block(services: Iterable[str], tenants: Mapping[str, tuple[str, Limits]]) -> str:
    """The block `accounts` of a server's configuration. `services`: the entries of the users of all services;
    `tenants`: the entry and the limits of each tenant, by its name."""
    exports, imports = [], []
    accounts = []
    for tenant, (user, limits) in sorted(tenants.items()):
        name, may = token(tenant), permissions.of_tenant(tenant)
        exports += [_export(subject, name) for subject in may.subscribe]
        imports += [_import(subject, name) for subject in may.publish]
        usual = {"to": f"{access.INBOX}.>"}
        own = [_import(subject, SERVICES_ACCOUNT) for subject in may.subscribe]
        own += [_import(f"{access.INBOX}.{name}.{access.MAPPED}.>", SERVICES_ACCOUNT) | usual]
        asks = [_export(subject, SERVICES_ACCOUNT) for subject in may.publish]
        accounts.append(_account(name, [user], _lines(limits), asks, own))
    return "\n".join(
        [
            "accounts {",
            _account(SERVICES_ACCOUNT, services, ["jetstream: enabled"], exports, imports),
            *accounts,
            "}",
        ]
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


_UNWRITABLE = re.compile(r"[\s#]")  # a tenant with such a name cannot stand in a line of the keys file
PASSWORD_BYTES = 32

# The passwords are 256 random bits: a higher work factor would not make guessing harder. The lowest one saves
# the server seconds when a whole fleet reconnects.
BCRYPT_ROUNDS = 4
ANSWER_WITHIN = "1m"
MOVE = (
    "tenants get accounts: stop the services and the nats-server, rename the folder `jetstream/$G` of its "
    f"files to `jetstream/{SERVICES_ACCOUNT}`, or stored requests are not found, and start all of them"
)
HEAD = "# made by `headrace auth`: "

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to make. `url` is the server to which the users will connect."""

    url: str
    fleet: str
    tenants: tuple[str, ...] = ()  # to add to the existing ones
    force: bool = False
    tls: Tls | None = None
    classes: tuple[str, ...] = ()  # that `tenants` may use; empty: as before, or access.DEFAULT_CLASSES
    leaves: bool = False  # the server listens for edges
    accounts: bool = False  # one for each tenant
    limits: str = ""  # of the accounts of `tenants`, see accounts.limits_of; empty: as before, or none


@dataclass(frozen=True, slots=True)
class User:
    """The password of one user, and its permissions; None in an account of its own."""

    password: str
    permissions: Permissions | None


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths of the server's certificate and key."""

    certificate: str
    key: str


def generate(folder: Path, plan: Plan, report: Report) -> None:
    """Make the missing credentials in `folder`. Raises SetupError for files that `headrace auth` did not make
    or that are for another server."""
    server = folder / "nats"
    for name in ("nats.conf", "users.conf"):
        if (server / name).exists() and not (server / name).read_text().startswith(HEAD):
            raise SetupError(f"{server / name} was not made by `headrace auth`: choose another folder")
    read_limits(plan.limits)
    users, has_accounts = {}, plan.accounts or bool(credentials.account_of(folder))
    for subfolder, (user, allowed) in _wanted(folder, plan).items():
        url = access.with_accounts(plan.url, on=has_accounts and subfolder in permissions.SERVICES)
        password = _password(folder / subfolder / FILE, user, url, plan, report)
        users[user] = User(password, None if has_accounts and subfolder.startswith(TENANTS) else allowed)
    _write(folder / "gateway" / KEYS, _http_keys(folder, plan.force))
    classes, usual = folder / "tokenizer" / CLASSES, ",".join(access.DEFAULT_CLASSES)
    _write(classes, _by_tenant(folder, classes, plan, ",".join(plan.classes), usual))
    _write(server / "nats.conf", server_conf(plan.tls, ServerLimits(), leaves=_has_leaves(folder, plan)))
    limits = None
    if has_accounts:
        if (server / "users.conf").exists() and not credentials.account_of(folder):
            report(MOVE)
        _write(server / ACCOUNTS, _by_tenant(folder, server / ACCOUNTS, plan, plan.limits, ""))
        limits = _limits(server / ACCOUNTS)
    conf = server / "users.conf"
    if not conf.exists() or not conf.read_text().startswith(head(users, limits) + "\n"):
        _write(conf, users_conf(users, limits))
        report(f"{conf}: {len(users)} users; a running nats-server reads it after a SIGHUP")


def tenants_in(folder: Path) -> list[str]:
    """The tenants that have credentials in `folder`, sorted."""
    return sorted(untoken(path.parent.name) for path in folder.glob(f"{TENANTS}/*/{FILE}"))


def tls_of(certificate: str, key: str) -> Tls | None:
    """The server's files for TLS, or None. Raises SetupError if only one is given."""
    if bool(certificate) != bool(key):
        raise SetupError("TLS needs --tls-cert and --tls-key, both as paths on the nats-server's machine")
    return Tls(certificate, key) if certificate else None


def _wanted(folder: Path, plan: Plan) -> Mapping[str, tuple[str, permissions.Permissions]]:
    """For every folder to fill: the name of its user and the user's permissions."""
    wanted = {
        kind: (access.user_of(kind), permissions.of_service(kind, plan.fleet))
        for kind in permissions.SERVICES
    }
    operator = access.OPERATOR
    wanted[operator] = (access.user_of(operator), permissions.of_operator(plan.fleet))
    if _has_leaves(folder, plan):
        wanted[access.LEAF] = (access.user_of(access.LEAF), permissions.of_leaf())
    there = tenants_in(folder)
    for tenant in dict.fromkeys([*there, *_checked(plan.tenants), *([] if there else [DEFAULT_TENANT])]):
        wanted[f"{TENANTS}/{token(tenant)}"] = (token(tenant), permissions.of_tenant(tenant))
    return wanted


def _has_leaves(folder: Path, plan: Plan) -> bool:
    return plan.leaves or (folder / access.LEAF / FILE).exists()


def _checked(tenants: Iterable[str]) -> Iterable[str]:
    for tenant in tenants:
        if not tenant or tenant.startswith(access.SERVICE_PREFIX):
            raise SetupError(
                f"{tenant!r} cannot be a tenant: names that begin with {access.SERVICE_PREFIX} are reserved"
            )
        yield tenant


def _password(path: Path, user: str, url: str, plan: Plan, report: Report) -> str:
    """The password in the file at `path`, or a new one written to it. `url`: of the server for this user."""
    there = credentials.read(path)
    if there and not plan.force:
        if access.shown(access.with_accounts(there, on=False)) != access.shown(plan.url):
            raise SetupError(
                f"{path} is for {access.shown(there)}, not for {access.shown(plan.url)}: choose another "
                "folder, or make all credentials anew with --force"
            )
        marked = access.with_accounts(there, on=access.parse(url).accounts)
        _write(path, path.read_text().replace(there, marked))
        return access.password_of(there)
    password = secrets.token_urlsafe(PASSWORD_BYTES)
    _write(path, f"nats_url = {json.dumps(access.as_user(url, user, password))}\n")
    report(f"{path}: new")
    return password


def _http_keys(folder: Path, force: bool) -> str:
    """Lines `tenant sha256:…` for the gateway. Lines for other tenants, which an operator added, are kept."""
    path = folder / "gateway" / KEYS
    there = path.read_text().splitlines() if path.exists() else []
    folders = {tenant: f"{TENANTS}/{token(tenant)}" for tenant in tenants_in(folder)}
    folders[access.user_of(access.OPERATOR)] = access.OPERATOR
    lines = [line for line in there if line.partition(" ")[0] not in folders]
    for name, subfolder in folders.items():
        own = folder / subfolder / API_KEY
        if force or not own.exists():
            _write(own, f"hr-{secrets.token_urlsafe(PASSWORD_BYTES)}\n")
        if not _UNWRITABLE.search(name):
            lines.append(f"{name} sha256:{sha256(own.read_text().strip().encode()).hexdigest()}")
    return "".join(f"{line}\n" for line in lines)


def _by_tenant(folder: Path, path: Path, plan: Plan, new: str, default: str) -> str:
    """Lines `tenant value`: those of the file at `path`, with `new` for the tenants of the plan or, if the
    plan names none, for all; a tenant without a line gets `default`."""
    there = (line.partition(" ") for line in (path.read_text().splitlines() if path.exists() else ()))
    values = {name: value for name, _, value in there if name}
    for tenant in tenants_in(folder):
        values.setdefault(token(tenant), default)
        if new and (tenant in plan.tenants or not plan.tenants):
            values[token(tenant)] = new
    return "".join(f"{name} {value}".rstrip() + "\n" for name, value in sorted(values.items()))


def _limits(path: Path) -> Mapping[str, Limits]:
    """The limits of each account in the file at `path`. Raises SetupError."""
    lines = (line.partition(" ") for line in path.read_text().splitlines())
    return {name: read_limits(text) for name, _, text in lines if name}


def classes_of(text: str) -> tuple[str, ...]:
    """The classes of a comma-separated list. Raises SetupError for an unknown class."""
    classes = tuple(filter(None, (name.strip() for name in text.split(","))))
    if wrong := [name for name in classes if name not in access.CLASSES]:
        raise SetupError(f"there is no class {wrong[0]!r}, only {', '.join(access.CLASSES)}")
    return classes


def _write(path: Path, text: str) -> None:
    """Replace a file atomically. Only its owner can read it and the folders made for it."""
    try:
        for missing in reversed([p for p in (path.parent, *path.parent.parents) if not p.exists()]):
            missing.mkdir(mode=0o700)
        if path.exists() and path.read_text() == text:
            return
        draft = path.with_suffix(".new")
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
            out.write(text)
        draft.replace(path)
    except OSError as error:
        raise SetupError(f"{path} cannot be written: {error}") from None


def users_conf(users: Mapping[str, User], limits: Mapping[str, Limits] | None = None) -> str:
    """The block `authorization` for these users or, with `limits` of the tenants' accounts, the block
    `accounts`; the first line is `head(users, limits)`."""
    entries = {name: _user(name, user) for name, user in sorted(users.items())}
    if limits is None:
        body = ["authorization {", "  users: [", *entries.values(), "  ]", "}"]
    else:
        tenants = {
            untoken(name): (entries[name], limits.get(name, {}))
            for name, user in users.items()
            if user.permissions is None
        }
        services = [entry for name, entry in entries.items() if users[name].permissions is not None]
        body = [accounts_block(services, tenants)]
    return "\n".join([head(users, limits), *body, ""])


def head(users: Mapping[str, User], limits: Mapping[str, Limits] | None = None) -> str:
    """The first line of `users_conf`, a hash of users, passwords, permissions and limits."""
    facts = json.dumps([[name, repr(user)] for name, user in sorted(users.items())])
    facts += "" if limits is None else json.dumps(limits, sort_keys=True)
    return HEAD + sha256(facts.encode()).hexdigest()[:32]


def server_conf(tls: Tls | None, limits: ServerLimits, *, leaves: bool = False) -> str:
    """The configuration of a server in its own container; it includes `users.conf` from the same folder."""
    files = f"cert_file: {quoted(tls.certificate)}, key_file: {quoted(tls.key)}" if tls else ""
    secured = [f"tls {{ {files} }}"] if tls else []
    return "\n".join(
        [
            HEAD + "limits and users of the server",
            "port: 4222",
            "http_port: 8222",
            *limits.lines(),
            'jetstream { store_dir: "/data", max_mem: 64MB, max_file: 3GB }',
            *secured,
            *([f"leafnodes {{ {', '.join((f'port: {PORT}', *secured))} }}"] if leaves else []),
            "include ./users.conf",
            "",
        ]
    )


def _user(name: str, user: User) -> str:
    login = f"    {{ user: {json.dumps(name)}, password: {json.dumps(_hashed(user.password))}"
    if (p := user.permissions) is None:
        return f"{login} }}"
    allowed = [f"publish: {{ allow: {_list(p.publish)} }}", f"subscribe: {{ allow: {_list(p.subscribe)} }}"]
    if p.answers:
        allowed.append(f'allow_responses: {{ max: 1, expires: "{ANSWER_WITHIN}" }}')
    rights = ",\n        ".join(allowed)
    return f"{login},\n      permissions: {{\n        {rights} }} }}"


def _list(patterns: tuple[str, ...]) -> str:
    return json.dumps(list(patterns))


def _hashed(password: str) -> str:
    try:
        import bcrypt
    except ModuleNotFoundError:
        raise SetupError("credentials need the package bcrypt: pip install bcrypt") from None
    # nats-server accepts only 2a, the older name of the same algorithm
    return bcrypt.hashpw(password.encode(), bcrypt.gensalt(BCRYPT_ROUNDS, prefix=b"2a")).decode()


def command(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    add = parser.add_argument
    add("folder", type=Path, help="where to write them, one folder for each user")
    add("--tenant", action="append", default=[], help="one more tenant; may be repeated")
    add("--classes", default="", metavar="LIST", help="classes of these tenants; default standard,batch")
    add("--force", action="store_true", help="make new passwords for every user")
    add("--leaves", action="store_true", help="the nats-server listens for edges on port 7422")
    add("--accounts", action="store_true", help="an account of the nats-server for each tenant")
    add("--limits", default="", metavar="LIST", help="of accounts: connections=9,payload=1MB")
    add("--tls-cert", default="", metavar="FILE", help="the nats-server's certificate")
    add("--tls-key", default="", metavar="FILE", help="its key")
    add("--show", metavar="NAME", help="print the URL of a service, operator or tenant")
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> None:
    settings = load(given).settings
    if given.show:
        print(credentials.url_of(given.folder, given.show, settings.nats_url))
        return
    url, tls = settings.nats_url or DEFAULT_NATS_URL, tls_of(given.tls_cert, given.tls_key)
    classes = classes_of(given.classes)
    plan = Plan(
        url, settings.fleet, tuple(given.tenant), given.force, tls, classes, given.leaves,
        given.accounts or bool(given.limits), given.limits,
    )  # fmt: skip
    generate(given.folder, plan, print_line)
