"""`Keeper`: what the parts of a keeper share. `Part`: what a capability adds to durable requests.

    actor ── table PARTS ──▶ webhooks, the way from an edge to its centre, batches

Without a part its doors stay as they are here: no URL may be called, and every request is answered here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from services.keeper.core import Event, KeeperCore, Key
from services.keeper.queues import TenantQueues
from services.keeper.records import Body, Hook, Work
from shared.actor.mailbox import Mailbox
from shared.aliases import Aliases
from shared.clock import Clock
from shared.config import Settings
from shared.errors import BadRequest, HeadraceError
from shared.nats.interface import Bus, Delivery
from shared.nats.jetstream import JetStream
from shared.processes import Rarely
from shared.telemetry.counters import Counted

# Capabilities beside durable requests: each makes a Part (parts.py) of a Keeper.
PARTS = (
    "services.keeper.webhooks:Webhooks",
    "services.keeper.forwarding:Forwarder",
    "services.keeper.batches.batch_shell:Batches",
)

# Answers a tenant, the second name in the subject, the body.
Verb = Callable[[str, str, bytes], Awaitable[Body | bytes]]


def refuse_url(_: object) -> NoReturn:
    """No URL may be called."""
    raise BadRequest(
        "`webhook`: this fleet calls none; its setting `webhooks` names no file of hosts", param="webhook"
    )


@dataclass(slots=True)
class Keeper:
    """One keeper process."""

    mailbox: Mailbox
    streams: JetStream
    queues: TenantQueues
    core: KeeperCore
    aliases: Aliases
    away: Rarely  # a log of what waits
    replicas: int  # servers of a cluster that have each message
    hosts: str  # the file of hosts that may be called; empty: none
    here: frozenset[str] | None  # the models that an edge serves itself; None: this is no edge
    spawn: Callable[[Coroutine[Any, Any, None]], None]  # runs a coroutine beside its caller
    handle: Callable[[Event], None]  # an event for the core
    verbs: dict[str, Verb] = field(default_factory=dict)  # what users ask, by subject
    end: Callable[[str, str], Awaitable[None]] = field(init=False)  # cancels a request
    # the doors
    check_url: Callable[[object], str] = refuse_url
    land: Callable[[Hook, str], Coroutine[Any, Any, None]] | None = None  # stores an event, then acks
    must_forward: Callable[[str], bool] = lambda model: False  # the centre of this edge answers for a model
    is_there: Callable[[Key], bool] = lambda key: False  # the centre has a request
    forward: Callable[[Work, int], None] = lambda work, age_us: None  # send one there

    @property
    def bus(self) -> Bus:
        """The connection."""
        return self.mailbox.bus

    @property
    def clock(self) -> Clock:
        """The clock."""
        return self.mailbox.clock

    def is_running(self, key: Key) -> bool:
        """True if a tokenizer, or the centre of this edge, has a request."""
        work = self.core.work(key)
        forwarded = work is not None and self.must_forward(work.model)
        return self.is_there(key) if forwarded else self.core.is_running(key)

    def ack(self, reply: str, hook: Hook | None) -> None:
        """Ack a delivery, after the event of its end is stored."""
        if hook is None:
            self.streams.ack(reply)
        elif self.land is None:
            self.away.warning("an event of %s is not sent: the setting `webhooks` is off", hook.kind)
            self.streams.ack(reply)
        else:
            self.spawn(self.land(hook, reply))


class Part:
    """A capability, which may set doors of its keeper. What it leaves out does nothing."""

    def __init__(self, keeper: Keeper) -> None:
        """Made when the keeper starts."""

    @staticmethod
    def check_settings(settings: Settings) -> None:
        """Raises SetupError for a wrong file: the keeper starts last."""

    async def start(self) -> None:
        """Subscribe."""

    def loops(self) -> Iterable[Coroutine[Any, Any, None]]:
        """What runs until the end."""
        return ()

    async def make_streams(self) -> None:
        """Make the streams that are missing. Raises HeadraceError."""

    def on_delivery(self, delivery: Delivery, age_us: int) -> bool:
        """The work queue delivers a message that it has had for `age_us`; True: it belongs to this part."""
        return False

    def on_answered(self, key: Key, outcome: Body | HeadraceError, size: int) -> bool:
        """A service answered; True: to a request of this part."""
        return False

    def on_reconnected(self) -> None:
        """The nats-server was away."""

    def tick(self) -> None:
        """Time has passed."""

    async def drain(self) -> None:
        """Give back what is in work: this keeper stops."""

    @property
    def counted(self) -> Counted:
        """Its counters."""
        return {}

    def status(self) -> Mapping[str, object]:
        """What `headrace status` has beside them."""
        return {}
