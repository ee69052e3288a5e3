"""`KeeperActor` runs the core: it pulls durable requests, sends them to tokenizers, stores their answers.

    stream WORK ──pull──▶ core ──generate──▶ tokenizer … detokenizer ──answer──▶ core ──▶ stream DONE

The tenant and the id alone decide the reply subject, and every keeper reads the answers of all: a keeper that
takes over a request of a dead one gets the answer of what already runs. Without JetStream a keeper runs on
and refuses `submit` with a reason; the requests of other clients need none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable
from pkgutil import resolve_name
from typing import Any

from services.keeper import core
from services.keeper.parts import PARTS, Keeper, Part, Verb
from services.keeper.queues import MAX_QUEUED, TenantQueues
from services.keeper.records import CANCELLED, Body, Work, work_of
from services.keeper.verbs import RECORD_ROOM, REPLIES, Verbs, reply_subject
from shared import bodies
from shared.actor.mailbox import Mailbox
from shared.actor.membership import can_start_cold, missing
from shared.actor.runtime import Actor, HeartbeatPayload
from shared.aliases import STAMP, Aliases
from shared.api import RUN_HEADER
from shared.client.client import error_of
from shared.config import Settings
from shared.errors import (
    BadRequest,
    EngineError,
    HeadraceError,
    Overloaded,
    PayloadTooLarge,
    Unavailable,
    UnknownModel,
    WireError,
)
from shared.nats import access, subjects
from shared.nats.interface import Delivery, Subscription
from shared.nats.jetstream import JetStream, Made, Taken, Unwritten, deliveries
from shared.processes import Rarely
from shared.replies import error_reply
from shared.telemetry.counters import Counted, KeeperCounter, Metrics, in_status, lately, points

log = logging.getLogger("headrace.keeper")

WORK_BYTES, DONE_BYTES = 268_435_456, 536_870_912  # with the next less than the 1 GB of the server of `up`
STATE_BYTES = 134_217_728  # 1,000 requests of 32,000 tokens
STATE_S = 3_600  # by then a fleet is back
STREAMS: dict[str, Body] = {
    subjects.WORK_STREAM: {
        "subjects": [subjects.WORK_ALL], "retention": "workqueue", "storage": "file", "discard": "new",
        "max_msgs": MAX_QUEUED, "max_bytes": WORK_BYTES, "allow_direct": True,
    },
    subjects.RECORD_STREAM: {
        "subjects": [subjects.RECORD_ALL], "storage": "file", "discard": "new", "max_msgs_per_subject": 1,
        "max_bytes": DONE_BYTES, "allow_direct": True, "allow_msg_ttl": True,
    },
}  # fmt: skip
STATE: Body = {  # savepoints: the last one of each request; full, it drops the oldest
    "subjects": [subjects.STATE_ALL], "storage": "file", "discard": "old", "max_msgs_per_subject": 1,
    "max_bytes": STATE_BYTES, "max_age": STATE_S * 1_000_000_000, "allow_direct": True,
}  # fmt: skip
OPEN_AGAIN_S = 1.0
STREAMS_POLL_S = 10.0  # between two looks at the streams
TICK_S = 0.5
MAX_ASKED = 1_024  # submits and results in work at a time


class KeeperActor(Actor):
    """One keeper process."""

    kind = "keeper"

    def __init__(self, replicas: int = 1, webhooks: str = "", here: frozenset[str] | None = None) -> None:
        """`replicas`: servers of a cluster that have each message. `webhooks`: the file of hosts that may be
        called; empty: none. `here`: the models that an edge serves itself; None: this is no edge."""
        self._replicas, self._hosts, self._here = replicas, webhooks, here
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, mailbox: Mailbox) -> None:
        self._mailbox, bus = mailbox, mailbox.bus
        self._core = core.KeeperCore()
        self._unwritten = Unwritten(mailbox.clock)
        self._made = Made(mailbox.clock)
        self._streams = JetStream(bus, self._replicas > 1, self._unwritten, self._made)
        self._queues = TenantQueues(self._streams, mailbox.guarded(self._on_work), self._core.room)
        self._aliases = Aliases(mailbox.clock.now_us)
        self._away = Rarely(log, mailbox.clock)
        self._calls: set[asyncio.Task[None]] = set()
        self._asked = 0  # submits and results in work
        self._keeper = keeper = Keeper(
            mailbox, self._streams, self._queues, self._core, self._aliases, self._away,
            self._replicas, self._hosts, self._here, self._call, self._handle,
        )  # fmt: skip
        self._verbs = Verbs(keeper)
        self._parts: list[Part] = [resolve_name(name)(keeper) for name in PARTS]
        await self._aliases.follow(bus)  # from here on it may be asked for its status
        await self._aliases.answer()
        for part in self._parts:
            await part.start()
        self._answers = await bus.subscribe(REPLIES, mailbox.guarded(self._on_reply))
        self._verb_subscriptions: list[Subscription] = [
            await bus.subscribe(subjects.CANCEL_ALL, self._on_cancel, queue="keeper"),
            *[
                await bus.subscribe(subject, self._answering(verb), queue="keeper")
                for subject, verb in keeper.verbs.items()
            ],
        ]
        await bus.subscribe(subjects.RUNS_ALL, self._on_runs)
        await bus.flush()  # the server has them before this keeper is ready
        loops = [self._pull(), self._keep_streams(), self._tick()]
        loops += [loop for part in self._parts for loop in part.loops()]
        self._tasks = [asyncio.get_running_loop().create_task(each) for each in loops]

    def on_broker(self, online: bool) -> None:
        if online:
            self._unwritten.clear()
            self._core.on_reconnected(self._mailbox.clock.now_us())
            for part in self._parts:
                part.on_reconnected()

    def upkeep(self) -> None:
        if self._tasks:
            self._aliases.catch_up(self._mailbox.peers.max_load("tokenizer", STAMP, ""))
        for task in self._tasks:
            if task.done():
                task.result()  # a failed loop fails the actor, as a failed handler does

    def heartbeat_payload(self) -> HeartbeatPayload:
        return HeartbeatPayload(counts=lately(self._counted))

    @property
    def metrics(self) -> Metrics:
        return points(self._counted)

    @property
    def _counted(self) -> Counted:
        own: Counted = {
            KeeperCounter.QUEUED: self._queues.queued,
            KeeperCounter.IN_FLIGHT: len(self._core),
            KeeperCounter.SUBMITTED: self._verbs.submitted,
            KeeperCounter.KEPT: self._verbs.kept,
            KeeperCounter.STORED: self._core.stored,
            KeeperCounter.REFUSED: self._core.refused,
            KeeperCounter.HELD_BACK: self._core.held_back,
        }
        return {**own, **{each: count for part in self._parts for each, count in part.counted.items()}}

    def status(self) -> dict[str, object]:
        found: dict[str, object] = {
            **in_status(self._counted),
            "taken_by": self._queues.taker,
            "unwritten": self._unwritten.facts(),
            "removed": self._made.facts(),
        }
        for part in self._parts:
            found |= part.status()
        return found

    async def drain(self) -> None:
        """Give the requests in flight back to the queue: another keeper, or this one after its restart, takes
        them up where they are."""
        for subscription in self._verb_subscriptions:
            await subscription.drain()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for part in self._parts:
            await part.drain()
        while self._calls:
            await asyncio.wait({*self._calls})
        self._run(self._core.give_back())
        await self._answers.cancel()

    # ---- the work queue --------------------------------------------------------------------------

    async def _pull(self) -> None:
        """Pull for ever, after the streams have been made if they are missing."""
        while True:
            try:
                await self._make_streams()
                await self._queues.run()
            except HeadraceError as error:
                self._away.warning("durable requests wait: %s", error.message)
                await asyncio.sleep(OPEN_AGAIN_S)

    async def _make_streams(self) -> None:
        """Make the streams that are missing. Raises HeadraceError."""
        for name, config in STREAMS.items():
            await self._streams.make_stream(name, {**config, "num_replicas": self._replicas})
        try:
            state = {**STATE, "num_replicas": self._replicas}
            await self._streams.make_stream(subjects.STATE_STREAM, state)
        except HeadraceError as error:  # requests then start over
            self._away.warning("there are no savepoints: %s", error.message)
        for part in self._parts:
            await part.make_streams()

    async def _keep_streams(self) -> None:
        """Make removed streams again, for ever: at once if a call has missed one, else at the next look."""
        lacking = self._made.lacking
        while True:
            await asyncio.sleep(OPEN_AGAIN_S)  # also between two calls that miss one: JetStream may be off
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STREAMS_POLL_S):
                    await lacking.wait()
            lacking.clear()
            try:
                await self._make_streams()
            except HeadraceError as error:
                self._away.warning("durable requests wait: %s", error.message)

    def _on_work(self, delivery: Delivery) -> None:
        reply, stored_us = delivery.reply, self._queues.age_us(delivery.reply)
        try:
            if any(part.on_delivery(delivery, stored_us) for part in self._parts):
                return
            work = work_of(delivery.data)
        except WireError:  # of another version, or of another writer
            log.error("dropped %s: it is not a durable request of this version", delivery.subject)
            self._streams.ack(reply)
            return
        self._handle(core.Delivered(work, reply, deliveries(reply), len(delivery.data), stored_us))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for model in filter(self._is_served, self._core.held_models):
                self._core.release(model)
            self._handle(core.Tick())
            for part in self._parts:
                part.tick()

    def _handle(self, event: core.Event) -> None:
        clock = self._mailbox.clock
        self._run(self._core.handle(event, clock.now_us(), clock.wall_us()))

    def _run(self, commands: Iterable[core.Command]) -> None:
        for command in commands:
            match command:
                case core.LookUp(key, savepoint):
                    self._call(self._look_up(key, savepoint=savepoint))
                case core.Ask(work, savepoint, run):
                    self._ask(work, savepoint, run)
                case core.Drop(key):
                    self._call(self._drop(key))
                case core.Store(key, record):
                    self._call(self._store(key, record))
                case core.Announce((tenant, request), status):
                    news = bodies.Ended(id=request, status=status)
                    self._mailbox.bus.publish(subjects.done(tenant, request), bodies.encode(news))
                case core.Ack(reply, hook):
                    self._keeper.ack(reply, hook)
                case core.Nak(reply, delay_us):
                    self._streams.nak(reply, delay_us)
                case core.Progress(reply):
                    self._streams.progress(reply)
        if not self._core.is_full:
            self._queues.has_room()

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _look_up(self, key: core.Key, *, savepoint: bool) -> None:
        exists: bool | None = None
        found: bytes | None = None
        try:
            if savepoint and self._made.was_found(subjects.STATE_STREAM):
                found = await self._streams.last(subjects.STATE_STREAM, subjects.state(*key))
            record = subjects.record(*key)  # one that a mirror lacks is taken when it is stored again
            exists = await self._streams.last(subjects.RECORD_STREAM, record, sure=False) is not None
        except HeadraceError as error:
            self._away.warning("durable requests wait: %s", error.message)
        self._handle(core.LookedUp(key, exists, found or b""))

    async def _drop(self, key: core.Key) -> None:
        if self._made.was_found(subjects.STATE_STREAM):
            with contextlib.suppress(HeadraceError):  # it expires
                await self._streams.purge(subjects.STATE_STREAM, subjects.state(*key))

    async def _store(self, key: core.Key, record: Body) -> None:
        new: bool | None = None
        try:
            await self._streams.create(subjects.record(*key), bodies.encode(record), ttl_s=core.KEPT_S)
            new = True
        except Taken:
            new = False
        except HeadraceError as error:
            self._away.warning("answers of durable requests wait to be stored: %s", error.message)
        self._handle(core.Stored(key, new))

    def _ask(self, work: Work, savepoint: bytes, run: int) -> None:
        if self._keeper.must_forward(work.model):
            age_us = self._core.age_us((work.tenant, work.id), self._mailbox.clock.now_us())
            self._keeper.forward(work, age_us)
            return
        make = subjects.resume if savepoint else subjects.generate
        subject, reply = make(work.tenant, work.model), reply_subject(work.tenant, work.id)
        headers = {RUN_HEADER: str(run)} if run else None
        data = savepoint or bodies.encode(work.body)
        self._mailbox.bus.publish(subject, data, reply=reply, headers=headers)

    def _on_reply(self, delivery: Delivery) -> None:
        _, tenant, _, request = delivery.subject.split(".")
        key = subjects.untoken(tenant), subjects.untoken(request)
        outcome = outcome_of(delivery, self._mailbox.bus.max_payload - self._core.kept_bytes(key))
        if not any(part.on_answered(key, outcome, len(delivery.data)) for part in self._parts):
            lacking = isinstance(outcome, Unavailable | UnknownModel) and self._is_unserved(key)
            self._handle(core.Answered(key, outcome, len(delivery.data), self._has_changed(key), lacking))

    def _is_unserved(self, key: core.Key) -> bool:
        """True if a service that a request's model needs is not there."""
        work = self._core.work(key)
        if work is None or self._is_served(work.model):
            return False
        self._away.warning("durable requests of %s wait: a service is not there", work.model)
        return True

    def _is_served(self, model: str) -> bool:
        """True if a model lacks no service, or if its scheduler keeps requests until an executor joins."""
        peers = self._mailbox.peers
        name = peers.aliases().get(model, model)
        return self._keeper.must_forward(model) or not missing(peers, name) or can_start_cold(peers, name)

    def _has_changed(self, key: core.Key) -> bool:
        """True if the executors of a request have other weights or modes than those at its `submit`."""
        work = self._core.work(key)
        before = work.model_digest if work is not None else ""
        now = self._mailbox.peers.model_digest(work.model) if work is not None and before else ""
        return bool(now) and now != before

    # ---- verbs -----------------------------------------------------------------------------------

    def _on_cancel(self, delivery: Delivery) -> None:
        if (names := subjects.names_in(delivery.subject)) is not None and self._asked < MAX_ASKED:
            self._call(self._cancel(names))

    async def _cancel(self, key: core.Key) -> None:
        self._asked += 1
        try:
            if await self._verbs.cancel(*key):
                self._run([core.Announce(key, CANCELLED)])
        except HeadraceError as error:
            self._away.warning("a request is not cancelled: %s", error.message)
        finally:
            self._asked -= 1

    def _on_runs(self, delivery: Delivery) -> None:
        """Answer another keeper if a request runs here; else be silent, since others may answer."""
        if (names := subjects.names_in(delivery.subject)) is not None and self._keeper.is_running(names):
            self._mailbox.bus.publish(delivery.reply, b"{}")

    def _answering(self, verb: Verb) -> Callable[[Delivery], None]:
        """A handler that answers each request with what `verb` returns for the two names in its subject."""

        def on_request(delivery: Delivery) -> None:
            if access.can_answer(self._mailbox.bus, delivery):
                self._call(self._answer(verb, delivery))

        return on_request

    async def _answer(self, verb: Verb, asked: Delivery) -> None:
        self._asked += 1
        try:
            if self._asked > MAX_ASKED:
                raise Overloaded(
                    "too many requests to this keeper at a time: try again", retry_after_ms=1_000
                )
            if (names := subjects.names_in(asked.subject)) is None:
                submit = asked.subject.startswith(subjects.SUBMIT_ALL.removesuffix("*.*"))
                param, why = subjects.wrong_name(asked.subject, "model" if submit else "id")
                raise BadRequest(why, param=param)
            answer = await verb(*names, asked.data)
            data = answer if isinstance(answer, bytes) else bodies.encode(answer)
            self._mailbox.bus.publish(asked.reply, data)
        except HeadraceError as error:
            self._mailbox.bus.publish(asked.reply, error_reply(error, "", ""))
        except Exception:  # a bug is a 500 for this client, never silence
            log.exception("a request on %s failed", asked.subject)
            bug = EngineError("the keeper failed on this request: see its log")
            self._mailbox.bus.publish(asked.reply, error_reply(bug, "", ""))
        finally:
            self._asked -= 1


def outcome_of(delivery: Delivery, max_payload: int) -> Body | HeadraceError:
    """The answer in a reply, or its error."""
    if delivery.has_no_responders:
        return Unavailable("no service answers for this model")
    if len(delivery.data) + RECORD_ROOM > max_payload:
        size = f"the answer of {len(delivery.data)} bytes with its record"
        return PayloadTooLarge(f"{size} is over the server's limit of {max_payload}: ask for less")
    try:
        body = bodies.decode(bodies.Json, delivery.data)
        return error_of(body) if "error" in body else body
    except WireError:
        return EngineError(f"a service answered with something that is not JSON: {delivery.data[:80]!r}")


def build(settings: Settings) -> KeeperActor:
    """The keeper for the configuration."""
    here = frozenset(settings.model_names) if settings.leaf else None  # `up` names them all
    return KeeperActor(settings.durable_replicas, settings.webhooks, here)
