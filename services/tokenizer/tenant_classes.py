"""TenantClasses says which service classes a tenant may use: a file that `headrace auth` writes.

    acme   interactive,standard,batch      a tenant, as in subjects (`token`), and its classes
    # a comment

Who is not listed may use DEFAULT_CLASSES. An empty path lets everybody use all.
"""

from __future__ import annotations

import logging

from shared.config import WatchedFile
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
        self._file = WatchedFile("tenant_classes", path, read_classes, log) if path else None

    def of(self, tenant: str) -> tuple[str, ...]:
        """The classes that a tenant may use."""
        return CLASSES if self._file is None else self._file.value.get(tenant, DEFAULT_CLASSES)

    def refresh(self) -> None:
        """Read the file again if it has changed; one that cannot be used changes nothing."""
        if self._file is not None:
            self._file.refresh()
