"""`CheckpointStore` is the shell of checkpoints: it sends them to stream HR_STATE, and takes those that a
keeper sends back.

    core ──due──▶ HR_STATE ──keeper, after the loss of everything──▶ resume ──▶ core, as a lost request
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from services.detokenizer.checkpoints import TURN_S
from services.detokenizer.core import DetokenizerCore
from services.detokenizer.response import Command
from shared.actor.mailbox import Mailbox
from shared.checkpoints import unpack
from shared.errors import BadRequest, PayloadTooLarge, WireError
from shared.nats import subjects
from shared.nats.interface import Delivery
from shared.processes import Rarely
from shared.replies import end_headers, error_reply
from shared.telemetry.readings import MetricPoint, Metrics

log = logging.getLogger("headrace.detokenizer")


class CheckpointStore:
    """The checkpoints of one shard. No token waits for them: an ack is counted, and read for its error alone,
    since a lost checkpoint is followed by another one."""

    def __init__(
        self, mailbox: Mailbox, core: DetokenizerCore, lost: Callable[[list[Command]], None], most_bytes: int
    ) -> None:
        """`lost` runs the commands of lost requests; with a backlog over `most_bytes` nothing is stored."""
        self._mailbox, self._core, self._lost, self._most_bytes = mailbox, core, lost, most_bytes
        self._acks = mailbox.bus.new_inbox()
        self._away = Rarely(log, mailbox.clock)
        self._timer = False
        self.stored = self.failed = 0

    async def listen(self, model: str, names: Sequence[str]) -> None:
        """Subscribe to the acks, and to requests of keepers for a model with these names."""
        subscribe, guarded = self._mailbox.bus.subscribe, self._mailbox.guarded
        self._model = model
        await subscribe(self._acks, guarded(self._on_ack))
        for name in names:
            resumed = subjects.resume_any_tenant(name)
            await subscribe(resumed, guarded(self._on_resume), queue="detokenizer")

    def watch(self) -> None:
        """Run the timer while a request has checkpoints."""
        if not self._timer and self._core.checkpoints.active:
            self._timer = True
            asyncio.get_running_loop().call_later(TURN_S, self._mailbox.guarded(self._turn))

    @property
    def metrics(self) -> Metrics:
        return tuple(
            MetricPoint(f"headrace.detokenizer.{name}", count, "{checkpoint}", is_counter=True)
            for name, count in (("checkpoints", self.stored), ("checkpoints_failed", self.failed))
        )

    def _turn(self) -> None:
        self._timer = False
        bus = self._mailbox.bus
        if not self._core.reconnect.away and bus.backlog_bytes <= self._most_bytes:
            for each in self._core.checkpoints.turn(self._mailbox.clock.now_us()):
                try:
                    bus.publish(each.subject, each.data, reply=self._acks)
                except PayloadTooLarge as error:
                    self._fail(error.message)
        self.watch()

    def _on_ack(self, delivery: Delivery) -> None:
        if delivery.no_responders:
            self._fail("there is no stream of checkpoints")
        elif b'"error"' in delivery.data:
            self._fail(delivery.data.decode("utf-8", "replace"))
        else:
            self.stored += 1

    def _fail(self, why: str) -> None:
        self.failed += 1
        self._away.warning("a checkpoint is not stored: %.200s", why)

    def _on_resume(self, asked: Delivery) -> None:
        """Have a request go on, or answer its keeper why it cannot; then it starts over."""
        clock, names = self._mailbox.clock, subjects.names_in(asked.subject)
        if names is None or not subjects.is_inbox(asked.reply):
            return
        try:
            tokenized, scores = unpack(asked.data)
            if (tokenized.tenant, tokenized.model, tokenized.inbox) != (names[0], self._model, asked.reply):
                raise WireError("the checkpoint is of another model or another request")
        except WireError as error:
            why = BadRequest(f"{error.message}: send the request again")
            self._mailbox.bus.publish(asked.reply, error_reply(why, "", ""), headers=end_headers(why))
            return
        self._lost(self._core.resume(tokenized, scores, clock.wall_us(), clock.now_us()))
