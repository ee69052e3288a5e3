"""`headrace auth` makes the credentials of every service and tenant, and the nats-server's side of them.

    DIR/nats/nats.conf, users.conf        for the server: users, hashed passwords, permissions
    DIR/tokenizer/headrace.toml, ...      for one service each: `nats_url` with its user and password
    DIR/gateway/keys                      for the gateway: the hashes of the API keys
    DIR/tokenizer/classes                 for the tokenizers: the service classes that a tenant may use
    DIR/operator/headrace.toml, api_key   for whoever runs the fleet: the command line, and over HTTP /metrics
    DIR/tenants/NAME/headrace.toml        for one tenant each, for NATS
    DIR/tenants/NAME/api_key              and for HTTP

A folder for each, so that each can be given away alone. Run again it keeps every password, adds what is
missing, and brings the server's side up to date; `--force` makes all of them anew. The server's files hold
passwords only as bcrypt hashes.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from services.launcher.nats_server import ServerLimits
from shared.errors import SetupError
from shared.nats import access
from shared.nats.access import Permissions
from shared.nats.subjects import DEFAULT_TENANT, token, untoken

FILE = "headrace.toml"
TENANTS = "tenants"
KEYS = "keys"  # the gateway's setting `http_keys`
CLASSES = "classes"  # the tokenizers' setting `tenant_classes`
API_KEY = "api_key"
_UNWRITABLE = re.compile(r"[\s#]")  # no line of that file can name such a tenant
PASSWORD_BYTES = 32

# The passwords are 256 random bits, which no work factor could make harder to guess; the least one keeps the
# return of a whole fleet after a restart of the server from costing it seconds.
BCRYPT_ROUNDS = 4
ANSWER_WITHIN = "1m"
HEAD = "# made by `headrace auth`: "

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to make. `url` is where the users will connect."""

    url: str
    fleet: str
    tenants: tuple[str, ...] = ()  # beside those that are there
    force: bool = False
    tls: Tls | None = None
    classes: tuple[str, ...] = ()  # that `tenants` may use; empty: as before, or access.DEFAULT_CLASSES


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


def generate(folder: Path, plan: Plan, report: Report) -> None:
    """Make what is missing in `folder`. Raises SetupError for files that are not ours or do not fit."""
    server = folder / "nats"
    for name in ("nats.conf", "users.conf"):
        if (server / name).exists() and not (server / name).read_text().startswith(HEAD):
            raise SetupError(f"{server / name} is not of `headrace auth`: choose another folder")
    users = {}
    for place, (user, allowed) in _wanted(folder, plan).items():
        users[user] = User(_password(folder / place / FILE, user, plan, report), allowed)
    _write(folder / "gateway" / KEYS, _http_keys(folder, plan.force))
    _write(folder / "tokenizer" / CLASSES, _classes(folder, plan))
    _write(server / "nats.conf", server_conf(plan.tls, ServerLimits()))
    if not _is_current(server / "users.conf", users):
        _write(server / "users.conf", users_conf(users))
        report(f"{server / 'users.conf'}: {len(users)} users; a running nats-server takes it after a SIGHUP")


def url_of(folder: Path, name: str, server: str = "") -> str:
    """The URL with the credentials of a service, the operator or a tenant; of another `server` if named.
    Raises SetupError."""
    known = (*access.SERVICES, access.OPERATOR)
    path = folder / (name if name in known else f"{TENANTS}/{token(name)}") / FILE
    url = _read(path)
    if not url:
        raise SetupError(f"there are no credentials in {path}: make them with `headrace auth {folder}`")
    return access.as_user(server, access.parse(url).user, access.password_of(url)) if server else url


def tenants_in(folder: Path) -> list[str]:
    """The tenants who have credentials in `folder`."""
    return sorted(untoken(path.parent.name) for path in folder.glob(f"{TENANTS}/*/{FILE}"))


def tls_of(certificate: str, key: str) -> Tls | None:
    """The server's files for TLS, None without. Raises SetupError when one is missing."""
    if bool(certificate) != bool(key):
        raise SetupError("TLS needs --tls-cert and --tls-key, both as the nats-server sees them")
    return Tls(certificate, key) if certificate else None


def authorization(folder: Path, fleet: str) -> str:
    """The block that lets the users of `folder` into a server. Raises SetupError, also where it is of another
    version or fleet, whose services may do other things."""
    path = folder / "nats" / "users.conf"
    try:
        users = path.read_text()
    except OSError as error:
        raise SetupError(f"no users to let in ({error}): run `headrace auth {folder}`") from None
    if not all(_list(access.of_service(kind, fleet).subscribe) in users for kind in access.SERVICES):
        raise SetupError(
            f"{path} is of another version or fleet: run `headrace auth {folder}` again, which keeps all "
            "passwords"
        )
    return users


def keys_of(folder: Path) -> Path:
    """The keys file of the gateway. Raises SetupError when there is none."""
    path = folder / "gateway" / KEYS
    if not path.exists():
        raise SetupError(f"there are no API keys in {path}: run `headrace auth {folder}`")
    return path


def _wanted(folder: Path, plan: Plan) -> Mapping[str, tuple[str, access.Permissions]]:
    """Every folder to fill: its user and what that may do."""
    wanted = {kind: (access.user_of(kind), access.of_service(kind, plan.fleet)) for kind in access.SERVICES}
    operator = access.OPERATOR
    wanted[operator] = (access.user_of(operator), access.of_operator(plan.fleet))
    there = tenants_in(folder)
    for tenant in dict.fromkeys([*there, *_checked(plan.tenants), *([] if there else [DEFAULT_TENANT])]):
        wanted[f"{TENANTS}/{token(tenant)}"] = (token(tenant), access.of_tenant(tenant))
    return wanted


def _checked(tenants: Iterable[str]) -> Iterable[str]:
    for tenant in tenants:
        if not tenant or tenant.startswith(access.SERVICE_PREFIX):
            raise SetupError(
                f"{tenant!r} cannot be a tenant: names that begin {access.SERVICE_PREFIX} are ours"
            )
        yield tenant


def _password(path: Path, user: str, plan: Plan, report: Report) -> str:
    """The password in the file at `path`, or a new one put there."""
    there = _read(path)
    if there and not plan.force:
        if access.shown(there) != access.shown(plan.url):
            raise SetupError(
                f"{path} is for {access.shown(there)}, not for {access.shown(plan.url)}: choose another "
                "folder, or make all credentials anew with --force"
            )
        return access.password_of(there)
    password = secrets.token_urlsafe(PASSWORD_BYTES)
    _write(path, f"nats_url = {json.dumps(access.as_user(plan.url, user, password))}\n")
    report(f"{path}: new")
    return password


def _http_keys(folder: Path, force: bool) -> str:
    """Lines `tenant sha256:…` for the gateway: what others wrote, then ours."""
    path = folder / "gateway" / KEYS
    there = path.read_text().splitlines() if path.exists() else []
    places = {tenant: f"{TENANTS}/{token(tenant)}" for tenant in tenants_in(folder)}
    places[access.user_of(access.OPERATOR)] = access.OPERATOR
    lines = [line for line in there if line.partition(" ")[0] not in places]
    for name, place in places.items():
        own = folder / place / API_KEY
        if force or not own.exists():
            _write(own, f"hr-{secrets.token_urlsafe(PASSWORD_BYTES)}\n")
        if not _UNWRITABLE.search(name):
            lines.append(f"{name} sha256:{sha256(own.read_text().strip().encode()).hexdigest()}")
    return "".join(f"{line}\n" for line in lines)


def _classes(folder: Path, plan: Plan) -> str:
    """Lines `tenant class,...` for the tokenizers: what is there, and what the plan names."""
    path = folder / "tokenizer" / CLASSES
    there = (line.partition(" ") for line in (path.read_text().splitlines() if path.exists() else ()))
    classes = {name: allowed for name, _, allowed in there if name}
    for tenant in tenants_in(folder):
        classes.setdefault(token(tenant), ",".join(access.DEFAULT_CLASSES))
        if plan.classes and (tenant in plan.tenants or not plan.tenants):
            classes[token(tenant)] = ",".join(plan.classes)
    return "".join(f"{name} {allowed}\n" for name, allowed in sorted(classes.items()))


def classes_of(text: str) -> tuple[str, ...]:
    """The classes in a list with commas. Raises SetupError for one that does not exist."""
    classes = tuple(filter(None, (name.strip() for name in text.split(","))))
    if wrong := [name for name in classes if name not in access.CLASSES]:
        raise SetupError(f"there is no class {wrong[0]!r}, only {', '.join(access.CLASSES)}")
    return classes


def _read(path: Path) -> str:
    try:
        return str(tomllib.loads(path.read_text())["nats_url"])
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError) as error:
        raise SetupError(f"{path} cannot be read: {error}; remove it to get a new one") from None


def _is_current(path: Path, users: Mapping[str, User]) -> bool:
    return path.exists() and path.read_text().startswith(head(users) + "\n")


def _write(path: Path, text: str) -> None:
    """Replace a file in one step: nobody but its owner can read it or its folder."""
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
