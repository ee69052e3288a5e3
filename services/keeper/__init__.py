"""Keeper: durable requests. It stores a request before it is answered, and its answer before it is forgotten.

actor.py       the shell: the streams, the pull loop, requests to tokenizers
core.py        work in flight: events in, commands out
records.py     the two messages of the store: work that waits, and the record of its end
verbs.py       what users ask: submit, result, cancel
queues.py      whose work is pulled next: tenants take turns
parts.py       what a capability adds, and what it may use; each is a line of the table PARTS:
webhooks.py    events of what has ended, where they may go, and how they are sent
forwarding.py  requests of an edge that its centre answers
batches/       batches of requests, and files
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shared.config import Settings


def check(settings: Settings) -> None:
    """Raise SetupError for a wrong file of webhooks: the keeper starts last."""
    if settings.durable and settings.webhooks:
        from services.keeper.parts import PARTS

        for name in PARTS:
            resolve_name(name).check_settings(settings)
