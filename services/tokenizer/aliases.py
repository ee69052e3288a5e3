"""`AliasNames` serves the aliases of a nats-server (shared/aliases.py) for one tokenizer.

A request to an alias arrives at one tokenizer of any model, which forwards it to its model as if the client
had sent it there. Every other tokenizer gets a copy of it: those of its model take it over if it is never
forwarded, as they do with each other's requests (standby.py). The request is owned only where it arrives.

The operator's change is one message: JetStream stores it, if it is there, and every holder reads it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from services.tokenizer.intake import UNSURE, key_of
from shared.actor.mailbox import Mailbox
from shared.aliases import ADAPTED, HEADER, MAX_ALIASES, Alias, Aliases, read_targets
from shared.api import REQUEST_ID
from shared.errors import BadRequest, HeadraceError, Overloaded, UnknownModel
from shared.nats import access, subjects
from shared.nats.interface import Bus, Delivery, NoResponders, RequestTimeout, Subscription
from shared.nats.jetstream import JetStream, Made, NothingStored
from shared.replies import change_reply

log = logging.getLogger("headrace.tokenizer")

ASK_US = 1_000_000
STREAM = {
    "subjects": [subjects.ALIAS_ALL], "storage": "file", "max_msgs_per_subject": 1, "allow_direct": True,
    "allow_msg_ttl": True, "max_bytes": 4_194_304,  # MAX_ALIASES with all their targets
}  # fmt: skip
STREAM_POLL_US = 10_000_000  # between two looks at the stream
DELETED_S = 86_400  # a deleted alias stays so long, for a tokenizer that was cut off meanwhile
_ID = REQUEST_ID.strip("^$").encode()
_JSON_ID = re.compile(rb'"request_id"\s*:\s*"(%b)"' % _ID)
_MSGPACK_ID = re.compile(rb"\xaarequest_id(?:[\xa1-\xbf]|\xd9.)(%b)" % _ID, re.DOTALL)


def request_id_in(delivery: Delivery) -> str:
    """What decides the model of a request: its `request_id`, else the hash of its inbox and body, which stay
    when it is sent again. The body is searched, not parsed: each tokenizer does this, with up to 8 MB."""
    data = delivery.data
    pattern = _JSON_ID if data.lstrip()[:1] == b"{" else _MSGPACK_ID
    if (found := pattern.search(data)) is not None:
        return found[1].decode()
    return f"{key_of(delivery)}"


class AliasNames:
    """The aliases, for one tokenizer."""

    def __init__(
        self,
        mailbox: Mailbox,
        table: Aliases,
        second: Bus,
        put_copy: Callable[[Delivery], None],
        names: tuple[str, ...],
    ) -> None:
        """`second`: the connection for copies, which go to `put_copy`. `names`: of the model."""
        self._mailbox, self._table, self._second = mailbox, table, second
        self._put_copy, self._names = put_copy, names
        self._is_model: Callable[[str], bool] = lambda name: False
        self._streams, self._replicas = JetStream(mailbox.bus, made=Made(mailbox.clock)), 1
        self._lacks: dict[str, None] = {}  # names whose aliases a new stream does not have yet
        self._looks_at_us = 0
        self._stored = False  # the stream was read
        self._subscriptions: dict[str, list[Subscription]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._setting, self._subscribing = asyncio.Lock(), asyncio.Lock()

    async def start(self, replicas: int) -> None:
        """Follow the changes, and take the table of the stream, which has `replicas`, and those of the other
        holders; wait for one of these."""
        self._replicas, self._table.on_change = replicas, self._on_change
        await self._table.follow(self._mailbox.bus)
        await self.load()
        self._table.ask()
        with contextlib.suppress(NoResponders, RequestTimeout):
            found = await self._mailbox.bus.request(subjects.ALIASES, b"", timeout_us=ASK_US)
            self._table.apply_all(found.data)

    async def listen(
        self, served: Callable[[], Mapping[str, str]], is_model: Callable[[str], bool], *, edge: bool = False
    ) -> list[Subscription]:
        """Serve the operator and the other holders. `served`: the models of this server by all of their
        names. `is_model`: whether a model has a name now, or had it a moment ago. An `edge` has no aliases:
        unknown names are for its centre."""
        self._served, self._is_model, self._table.is_there = served, is_model, is_model
        subscribe = self._mailbox.bus.subscribe
        return [
            *[
                await subscribe(s, self._on_set, queue="aliases")
                for s in (() if edge else (subjects.SET_ALIAS_ALL,))
            ],
            await self._table.answer(),
        ]

    def upkeep(self) -> None:
        """Look now and then whether there are aliases that no stream has."""
        now_us = self._mailbox.clock.now_us()
        if self._table.every() and now_us >= self._looks_at_us:
            self._looks_at_us = now_us + STREAM_POLL_US
            self._call(self._look())

    async def _look(self) -> None:
        with contextlib.suppress(HeadraceError):  # JetStream is away: the next look may find it
            await self._make_stream()

    async def _make_stream(self) -> None:
        """Make the stream if it is missing, with all aliases that are known. Raises HeadraceError."""
        config = {**STREAM, "num_replicas": self._replicas}
        made = await self._streams.make_stream(subjects.ALIAS_STREAM, config)
        self._lacks |= dict.fromkeys(alias.name for alias in self._table.every() if made)
        for name in [*self._lacks]:
            if (alias := self._table.last(name)) is not None:
                await self._store(alias)
            self._lacks.pop(name, None)

    async def _store(self, alias: Alias) -> None:
        ttl_s = 0 if alias.targets else DELETED_S
        await self._streams.replace(subjects.alias(alias.name), alias.pack(), ttl_s=ttl_s)

    @property
    def removed(self) -> dict[str, float]:
        """Seconds since the stream was found to be removed, by its name."""
        return self._streams.made.facts()

    async def load(self) -> None:
        """Read the stream, unless that was done. JetStream may be away for a moment."""
        if self._stored:
            return
        try:
            found = await self._streams.subjects_like(subjects.ALIAS_STREAM, subjects.ALIAS_ALL)
            self._streams.made.on_found(subjects.ALIAS_STREAM)
            for subject in found:
                if (data := await self._streams.last(subjects.ALIAS_STREAM, subject)) is not None:
                    self._table.apply_all(b"[%b]" % data)
            self._stored = True
        except NothingStored:
            self._stored = True  # what comes is announced
        except HeadraceError as error:
            log.warning("the stored aliases are not read yet: %s", error)

    async def drain(self) -> None:
        """Return when no change is on its way."""
        for subscriptions in [*self._subscriptions.values()]:
            for subscription in subscriptions:
                await subscription.drain()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def forward(self, delivery: Delivery, tenant: str, name: str) -> bool:
        """Send a request to an alias on to its model. False without an alias of this name. Raises
        PayloadTooLarge."""
        made = self._forwarded(delivery, tenant, name)
        if made is not None:
            self._second.publish(made.subject, made.data, reply=made.reply, headers=made.headers)
        return made is not None

    def _forwarded(self, delivery: Delivery, tenant: str, name: str) -> Delivery | None:
        if HEADER in delivery.headers or self._is_model(name):
            return None  # it was forwarded once; the name of a model goes first
        model = self._table.resolve(name, tenant, request_id_in(delivery))
        if model is None:
            return None
        headers = {**delivery.headers, HEADER: subjects.token(name)}
        alias = self._table.get(name)
        if alias is not None and alias.adapter is not None:
            headers[ADAPTED] = "1"
        return Delivery(subjects.generate(tenant, model), delivery.data, delivery.reply, headers)

    def _on_copy(self, delivery: Delivery) -> None:
        """Keep a copy of a request that goes to this model, under the subject that the forwarded one has: if
        that arrives, too, the two are one."""
        if (names := subjects.names_in(delivery.subject)) is None:
            return
        made = self._forwarded(delivery, *names)
        if made is not None and subjects.name_at(made.subject, 4) in self._names:
            self._put_copy(made._replace(headers={**made.headers, UNSURE: names[1]}))

    def _on_text(self, delivery: Delivery) -> None:
        """Forward a request for token ids, or for the text of some, to the model with the highest weight."""
        names = subjects.names_in(delivery.subject)
        alias = self._table.get(names[1]) if names is not None else None
        if names is not None and alias is not None and access.can_answer(self._mailbox.bus, delivery):
            make = subjects.tokenize if ".tokenize." in delivery.subject else subjects.detokenize
            headers = dict(delivery.headers)
            self._second.publish(
                make(names[0], alias.among(self._is_model).main),
                delivery.data,
                reply=delivery.reply,
                headers=headers,
            )

    # ---- changes ---------------------------------------------------------------------------------

    def _on_set(self, delivery: Delivery) -> None:
        if access.can_answer(self._mailbox.bus, delivery):
            self._call(self._answer(delivery))

    async def _answer(self, asked: Delivery) -> None:
        reply = await change_reply(self._asked(asked), asked.subject, log)
        self._mailbox.bus.publish(asked.reply, reply)

    async def _asked(self, asked: Delivery) -> dict[str, Any]:
        name = subjects.name_at(asked.subject, 3)
        async with self._setting:
            return await self._set(name, read_targets(asked.data))

    async def _set(self, name: str, asked: Mapping[str, int]) -> dict[str, Any]:
        """Set an alias, or delete it. The answer: the models before and after, and whether JetStream has the
        change. Raises BadRequest, UnknownModel, Overloaded."""
        before, served = self._table.get(name), self._served()
        if before is not None and before.adapter is not None:
            raise BadRequest(f"{name!r:.80} is an adapter: see `headrace adapter`", param="alias")
        if not asked and before is None:
            raise UnknownModel(f"there is no alias {name!r:.80}: see `headrace model list`", param="alias")
        if asked and (name in served or self._is_model(name)):
            why = f"{name!r:.80} is a name of model {served.get(name, name)!r:.80}"
            raise BadRequest(f"{why}, or was within the last minute: choose another alias", param="alias")
        targets = dict[str, int]()
        for model, weight in asked.items():
            if self._table.get(model) is not None or model == name:
                why = f"{model!r:.80} is an alias or an adapter: name the models that it stands for"
                raise BadRequest(why, param="model")
            if model not in served:
                there = ", ".join(sorted(served))
                why = f"no service serves model {model!r:.80}; name one of: {there:.200}"
                raise UnknownModel(why, param="model")
            targets[served[model]] = targets.get(served[model], 0) + weight
        change = self._table.next(name, targets.items(), self._mailbox.clock.wall_us())
        if not self._table.has_room(name):
            full = (
                f"there are {MAX_ALIASES} aliases, with those deleted since the start: use one of their names"
            )
            raise Overloaded(full)
        stored = await self.publish(change)
        self._table.apply(change)
        shown = {"alias": name, "before": dict(before.targets) if before is not None else {}}
        return {**shown, "after": targets, "stored": stored}

    async def publish(self, change: Alias) -> bool:
        """Send a change to all holders; returns whether JetStream has it, too."""
        try:
            await self._make_stream()
            await self._store(change)
        except HeadraceError as error:
            log.warning("alias %s is not stored, and ends with the last service: %s", change.name, error)
            self._mailbox.bus.publish(subjects.alias(change.name), change.pack())
            return False
        return True

    def _on_change(self, alias: Alias) -> None:
        self._call(self._subscribe(alias.name))

    async def _subscribe(self, name: str) -> None:
        """Receive what is sent to an alias, and nothing more once it is deleted."""
        async with self._subscribing:
            wanted, subscribe = self._table.get(name) is not None, self._second.subscribe
            if wanted and name not in self._subscriptions:
                text = subjects.tokenize_any_tenant(name), subjects.detokenize_any_tenant(name)
                self._subscriptions[name] = [
                    await subscribe(subjects.generate_any_tenant(name), self._on_copy),
                    *[await subscribe(subject, self._on_text, queue="tokenizer") for subject in text],
                ]
            elif not wanted:
                for subscription in self._subscriptions.pop(name, ()):
                    await subscription.cancel()

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
