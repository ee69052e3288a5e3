"""Keeper: durable requests. It stores a request before it is answered, and its answer before it is forgotten.

records.py     the two messages of the store: work that waits, and the record of its end
core.py        work in flight: events in, commands out
verbs.py       what users ask: submit, result, cancel, files; batch_verbs.py: batches
queues.py      whose work is pulled next: tenants take turns
batch_core.py  one batch; batch_shell.py runs those of this keeper
webhooks.py    events of what has ended, where they may go, and how they are sent
actor.py       the shell: the streams, the pull loop, requests to tokenizers
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shared.config import Settings


def check(settings: Settings) -> None:
    """Raise SetupError for a wrong file of webhooks: the keeper starts last."""
    if settings.durable and settings.webhooks:
        from services.keeper.webhooks import log, read_hosts
        from shared.config import WatchedFile

        WatchedFile("webhooks", settings.webhooks, read_hosts, log)
