"""Who may use the API: a file of lines `tenant key`, read again when it changes.

    acme   hr-3f9c…                    the key as the client sends it, as `Authorization: Bearer hr-3f9c…`
    acme   sha256:9b74c9897bac…        or only its SHA-256 in hex, so that the file holds no secret
    # a comment

Keys are looked up by their hash: how long that takes says nothing about the keys.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from services.gateway.refusals import NotAuthorized
from shared.errors import SetupError
from shared.subjects import DEFAULT_TENANT, MAX_NAME_CHARS

log = logging.getLogger("headrace.gateway")

HASHED = "sha256:"
_HEX = re.compile(r"[0-9a-f]{64}")


def read_keys(text: str) -> dict[str, str]:
    """Tenants by the hash of their keys. Raises ValueError that names the line."""
    tenants: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.partition("#")[0].split()
        if not fields:
            continue
        if len(fields) != 2 or len(fields[0]) > MAX_NAME_CHARS:
            raise ValueError(f"line {number}: `tenant key` is expected")
        tenant, key = fields
        name = key.removeprefix(HASHED) if key.startswith(HASHED) else _hash(key)
        if not _HEX.fullmatch(name):
            raise ValueError(f"line {number}: {HASHED} and 64 hex digits are expected")
        if tenants.setdefault(name, tenant) != tenant:
            raise ValueError(f"line {number}: this key is another tenant's, too")
    return tenants


class Keys:
    """The keys of one gateway; an empty path lets everybody in, as the default tenant."""

    def __init__(self, path: str) -> None:
        """Raises SetupError when the file cannot be used."""
        self._path = Path(path).expanduser() if path else None
        self._stamp = (0, 0)
        self._tenants: Mapping[str, str] = {}
        try:
            self._read()
        except (OSError, ValueError) as error:
            raise SetupError(f"http_keys: {path} cannot be used: {error}") from None

    def tenant_of(self, authorization: str) -> str:
        """Whose the key in an `Authorization` header is. Raises NotAuthorized."""
        if self._path is None:
            return DEFAULT_TENANT
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise NotAuthorized("no API key: send `Authorization: Bearer KEY`")
        tenant = self._tenants.get(_hash(key.strip()))
        if tenant is None:
            raise NotAuthorized("this API key is not known here")
        return tenant

    def refresh(self) -> None:
        """Read the file again if it has changed; one that cannot be used changes nothing."""
        try:
            self._read()
        except (OSError, ValueError) as error:
            log.error("http_keys: %s cannot be used, the keys before remain: %s", self._path, error)

    def _read(self) -> None:
        if self._path is None:
            return
        facts = self._path.stat()
        stamp = (facts.st_mtime_ns, facts.st_size)
        if stamp != self._stamp:
            self._stamp = stamp  # also of a bad one: it is told once
            self._tenants = read_keys(self._path.read_text())


def _hash(key: str) -> str:
    return sha256(key.encode()).hexdigest()
