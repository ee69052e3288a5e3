"""`DurableShell` has readers attach to running requests. It sends savepoints to stream HR_STATE, and takes
those that a keeper sends back.

    core ──due──▶ HR_STATE ──keeper, after the loss of everything──▶ resume ──▶ core, as a lost request
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from services.detokenizer.core import DetokenizerCore
from services.detokenizer.durable.attach import Attachments
from services.detokenizer.durable.savepoints import SAVEPOINT_S, Savepoints
from services.detokenizer.response import Command
from shared.actor.mailbox import Mailbox
from shared.errors import BadRequest, PayloadTooLarge, WireError
from shared.nats import access, subjects
from shared.nats.interface import Delivery
from shared.processes import Rarely
from shared.replies import end_headers, error_reply
from shared.savepoints import unpack
from shared.telemetry.counters import DetokenizerCounter, Metrics, points

log = logging.getLogger("headrace.detokenizer")

Run = Callable[[list[Command]], None]


class DurableShell:
    """The attached readers and the savepoints of one shard. No token waits for a savepoint: an ack is
    counted, and read for its error alone, since a lost savepoint is followed by another one."""

    def __init__(self, mailbox: Mailbox, core: DetokenizerCore, run: Run, lost: Run, most_bytes: int) -> None:
        """`run` runs commands, `lost` those of lost requests; with a backlog over `most_bytes` nothing is
        stored, and no reader attaches."""
        self._mailbox, self._core, self._most_bytes = mailbox, core, most_bytes
        self._run, self._lost = run, lost
        self._attachments = Attachments(core.table, core.reconnect)
        self._savepoints = Savepoints(core.table)
        self._acks = mailbox.bus.new_inbox()
        self._away = Rarely(log, mailbox.clock)
        self._timer = False
        self.stored = self.failed = 0

    async def listen(self, model: str, names: Sequence[str]) -> None:
        """Subscribe to requests to attach, to the acks, and to requests of keepers for a model with these
        names."""
        subscribe, guarded = self._mailbox.bus.subscribe, self._mailbox.guarded
        self._model = model
        await subscribe(subjects.ATTACH_ALL, guarded(self._on_attach))
        await subscribe(self._acks, guarded(self._on_ack))
        for name in names:
            resumed = subjects.resume_any_tenant(name)
            await subscribe(resumed, guarded(self._on_resume), queue="detokenizer")

    def watch(self) -> None:
        """Run the timer while a request has savepoints."""
        if not self._timer and self._savepoints.is_active:
            self._timer = True
            asyncio.get_running_loop().call_later(SAVEPOINT_S, self._mailbox.guarded(self._write_due))

    @property
    def metrics(self) -> Metrics:
        counted = {
            DetokenizerCounter.SAVEPOINTS: self.stored, DetokenizerCounter.SAVEPOINTS_FAILED: self.failed,
        }  # fmt: skip
        return points(counted)

    def _on_attach(self, asked: Delivery) -> None:
        bus, names = self._mailbox.bus, subjects.names_in(asked.subject)
        if names is not None and access.can_answer(bus, asked):
            full = bus.backlog_bytes > self._most_bytes
            commands = self._attachments.attach(*names, asked.reply, asked.data, full=full)
            self._core.frames += len(commands)
            self._run(commands)

    def _write_due(self) -> None:
        self._timer = False
        bus = self._mailbox.bus
        if not self._core.reconnect.is_away and bus.backlog_bytes <= self._most_bytes:
            for each in self._savepoints.take_due(self._mailbox.clock.now_us()):
                try:
                    bus.publish(each.subject, each.data, reply=self._acks)
                except PayloadTooLarge as error:
                    self._fail(error.message)
        self.watch()

    def _on_ack(self, delivery: Delivery) -> None:
        if delivery.has_no_responders:
            self._fail("there is no stream of savepoints")
        elif b'"error"' in delivery.data:
            self._fail(delivery.data.decode("utf-8", "replace"))
        else:
            self.stored += 1

    def _fail(self, why: str) -> None:
        self.failed += 1
        self._away.warning("a savepoint is not stored: %.200s", why)

    def _on_resume(self, asked: Delivery) -> None:
        """Have a request go on, or answer its keeper why it cannot; then it starts over."""
        clock, names = self._mailbox.clock, subjects.names_in(asked.subject)
        if names is None or not subjects.is_inbox(asked.reply):
            return
        try:
            tokenized, scores = unpack(asked.data)
            if (tokenized.tenant, tokenized.model, tokenized.inbox) != (names[0], self._model, asked.reply):
                raise WireError("the savepoint is of another model or another request")
        except WireError as error:
            why = BadRequest(f"{error.message}: send the request again")
            self._mailbox.bus.publish(asked.reply, error_reply(why, "", ""), headers=end_headers(why))
            return
        self._lost(self._core.resume(tokenized, scores, clock.wall_us(), clock.now_us()))
