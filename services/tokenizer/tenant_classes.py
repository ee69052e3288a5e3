"""TenantClasses says which service classes a tenant may use: a file that `headrace auth` writes.

    acme   interactive,standard,batch      a tenant, as in subjects (`token`), and its classes
    # a comment

Who is not listed may use DEFAULT_CLASSES. An empty path lets everybody use all.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from shared.errors import SetupError
from shared.nats.access import CLASSES, DEFAULT_CLASSES
from shared.nats.subjects import untoken

log = logging.getLogger("headrace.tokenizer")


def read_classes(text: str) -> dict[str, tuple[str, ...]]:
    """The classes of each tenant. Raises ValueError that names the line."""
    found: dict[str, tuple[str, ...]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.partition("#")[0].split()
        if not fields:
            continue
        classes = tuple(fields[1].split(",")) if len(fields) == 2 else ()
        if not classes or not set(classes) <= set(CLASSES):
            raise ValueError(f"line {number}: `tenant class,...` is expected, of {', '.join(CLASSES)}")
        found[untoken(fields[0])] = classes
    return found


class TenantClasses:
    """Reads the file again when it changes."""

    def __init__(self, path: str = "") -> None:
        """Raises SetupError when the file cannot be used."""
        self._path = Path(path).expanduser() if path else None
        self._stamp = (0, 0)
        self._classes: Mapping[str, tuple[str, ...]] = {}
        try:
            self._read()
        except (OSError, ValueError) as error:
            raise SetupError(f"tenant_classes: {path} cannot be used: {error}") from None

    def of(self, tenant: str) -> tuple[str, ...]:
        """The classes that a tenant may use."""
        return CLASSES if self._path is None else self._classes.get(tenant, DEFAULT_CLASSES)

    def refresh(self) -> None:
        """Read the file again if it has changed; one that cannot be used changes nothing."""
        try:
            self._read()
        except (OSError, ValueError) as error:
            log.error("tenant_classes: %s cannot be used, those before remain: %s", self._path, error)

    def _read(self) -> None:
        if self._path is None:
            return
        facts = self._path.stat()
        stamp = (facts.st_mtime_ns, facts.st_size)
        if stamp != self._stamp:
            self._stamp = stamp  # also of a bad one: it is told once
            self._classes = read_classes(self._path.read_text())
