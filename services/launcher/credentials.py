"""The credentials of a fleet, in a folder of `headrace auth` (commands/auth.py)."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

from shared.errors import SetupError
from shared.nats import access, permissions
from shared.nats.subjects import token

SERVICES_ACCOUNT = access.user_of("services")  # the account of the services; no tenant has such a name
FILE = "headrace.toml"
TENANTS = "tenants"
KEYS = "keys"  # the gateway's setting `http_keys`
ACCOUNTS = "accounts"  # in the folder of the server
CLASSES = "classes"  # the tokenizers' setting `tenant_classes`
API_KEY = "api_key"


def url_of(folder: Path, name: str, server: str = "") -> str:
    """The URL with the credentials of a service, the operator or a tenant, for another `server` if named.
    Raises SetupError if there are none."""
    known = (*permissions.SERVICES, access.OPERATOR, access.LEAF)
    path = folder / (name if name in known else f"{TENANTS}/{token(name)}") / FILE
    url = read(path)
    if not url:
        raise SetupError(f"there are no credentials in {path}: make them with `headrace auth {folder}`")
    if not server:
        return url
    login = access.parse(url)
    return access.with_accounts(
        access.as_user(server, login.user, access.password_of(url)), on=login.accounts
    )


def authorization(folder: Path, fleet: str) -> str:
    """The users of a server's configuration, from users.conf in `folder`. Raises SetupError if the file is
    missing, or was made for another version or fleet with other permissions."""
    path = folder / "nats" / "users.conf"
    try:
        users = path.read_text()
    except OSError as error:
        raise SetupError(f"no credentials for services ({error}): run `headrace auth {folder}`") from None
    lists = [{*json.loads(found)} for found in re.findall(r"subscribe: \{ allow: (\[.*?\])", users)]
    if not all({*permissions.of_service(kind, fleet).subscribe} in lists for kind in permissions.SERVICES):
        raise SetupError(
            f"{path} is for another version or fleet: run `headrace auth {folder}` again, which keeps all "
            "passwords"
        )
    return users


def account_of(folder: Path | None) -> str:
    """The account of the services at the nats-server of `folder`; empty where tenants have no accounts."""
    return SERVICES_ACCOUNT if folder is not None and (folder / "nats" / ACCOUNTS).exists() else ""


def keys_of(folder: Path) -> Path:
    """The path of the gateway's keys file. Raises SetupError if it does not exist."""
    path = folder / "gateway" / KEYS
    if not path.exists():
        raise SetupError(f"there are no API keys in {path}: run `headrace auth {folder}`")
    return path


def operator_key(folder: Path) -> str:
    """The operator's API key in a folder of `headrace auth`; empty if it cannot be read here."""
    try:
        return (folder / access.OPERATOR / API_KEY).read_text().strip()
    except OSError:
        return ""


def read(path: Path) -> str:
    """The URL in the file at `path`, "" without the file. Raises SetupError."""
    try:
        return str(tomllib.loads(path.read_text())["nats_url"])
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError) as error:
        raise SetupError(f"{path} cannot be read: {error}; remove it to get a new one") from None
