"""`TenantClasses` holds the service classes that each tenant may use, from a file of `headrace auth`.

    acme   interactive,standard,batch      a tenant, as in subjects (`token`), and its classes
    # a comment

A tenant that is not listed may use DEFAULT_CLASSES. With an empty path all tenants may use all classes.
"""

from __future__ import annotations

import logging

from shared.config import WatchedFile
from shared.nats.access import CLASSES, DEFAULT_CLASSES
from shared.nats.subjects import untoken

log = logging.getLogger("headrace.tokenizer")


def read_classes(text: str) -> dict[str, tuple[str, ...]]:
    """The classes of each tenant. Raises ValueError with the line number."""
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
    """The classes by tenant, from a file that may change."""

    def __init__(self, path: str = "") -> None:
        """Raises SetupError if the file is invalid."""
        self._file = WatchedFile("tenant_classes", path, read_classes, log) if path else None

    def of(self, tenant: str) -> tuple[str, ...]:
        """The classes that a tenant may use."""
        return CLASSES if self._file is None else self._file.value.get(tenant, DEFAULT_CLASSES)

    def refresh(self) -> None:
        """Read the file again if it has changed; an invalid file is logged and ignored."""
        if self._file is not None:
            self._file.refresh()
