"""`Aliases` is the table of aliases: names that stand for one model, or for several with weights.

    operator ──alias──▶ a tokenizer ──Alias──▶ every tokenizer, gateway and keeper; stream HR_ALIASES

An operator sets an alias while requests run. Every holder of the table takes a change with a higher version,
so all of them end with the same table, in any order of the changes. A tokenizer's heartbeat has the
`stamp` of its table: a holder with a lower one asks the others for theirs, and so does a tokenizer that
starts. So a change has a version above those of the same name before it, also with a slow
clock. The aliases are those of a nats-server, as the models are, and not of a fleet.

A hash of the request's id decides the model: the same request sent again goes to the same one. That holds
for REMEMBERED_US also when the alias has changed meanwhile, since the first one may still run. While a model
is not there, the others take its requests, by the same hash.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace

from shared import bodies
from shared.errors import BadRequest, UnknownModel, WireError
from shared.kv_blocks import rendezvous
from shared.nats import access, subjects
from shared.nats.interface import Bus, Delivery, Subscription

log = logging.getLogger("headrace.aliases")

HEADER = "Headrace-Alias"  # of a request that was sent to an alias, and forwarded to one of its models
ADAPTED = "Headrace-Adapter"  # beside it: the alias is an adapter of that model
STAMP = "aliases"  # in the load of a tokenizer's heartbeat
MAX_ALIASES = 1_024  # with the deleted ones: a name that is forgotten could come back from an older table
MAX_TARGETS, MAX_WEIGHT = 16, 1_000_000
REMEMBERED, REMEMBERED_US = 8_192, 60_000_000  # requests; clients resend within seconds
SETTLED_US = 2_000_000  # after a change all holders have it, also one that has missed it: two heartbeats


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The weights that an alias adds to its model: those of this digest, in a folder where executors run."""

    digest: str
    path: str
    rank: int
    bytes: int
    tenant: str = ""  # which alone may use it; empty: any


@dataclass(frozen=True, slots=True)
class Alias:
    """What a name stands for."""

    name: str
    version: int  # above the one before, and unique: if it can be, the time, µs. The highest one holds
    targets: tuple[tuple[str, int], ...]  # models with their weights; none: the alias is deleted
    adapter: AdapterFiles | None = None  # it is an adapter of its one model, or was one before it was deleted

    def model_for(self, tenant: str, request: str) -> str:
        """The model of a request. A change of weights moves no more requests than it must."""
        weights = dict(self.targets)
        return rendezvous(f"{self.name}\0{tenant}\0{request}", weights, weights)

    @property
    def main(self) -> str:
        """The model with the highest weight."""
        return max(self.targets, key=lambda target: target[1])[0]

    def among(self, is_there: Callable[[str], bool]) -> Alias:
        """The alias with those of its models that are there; with all of them if none is."""
        there = tuple(target for target in self.targets if is_there(target[0]))
        return replace(self, targets=there or self.targets)

    def pack(self) -> bytes:
        """The message in stream HR_ALIASES."""
        return bodies.encode(asdict(self))


def read_targets(data: bytes) -> dict[str, int]:
    """Models and their weights from the body of an operator's request; none deletes the alias. Raises
    BadRequest."""
    try:
        found = bodies.decode(bodies.Json, data)
    except WireError:
        raise BadRequest(
            'the body is not a JSON object of models and weights like {"a": 95, "b": 5}'
        ) from None
    if len(found) > MAX_TARGETS:
        raise BadRequest(f"an alias has at most {MAX_TARGETS} models, not {len(found)}")
    for model, weight in found.items():
        if not 0 < len(model) <= subjects.MAX_NAME_CHARS or not model.isprintable():
            raise BadRequest(f"{model!r:.80} is not a name of a model", param="model")
        if type(weight) is not int or not 0 < weight <= MAX_WEIGHT:
            why = f"the weight of {model!r} is {weight!r:.40}, not a whole number from 1 to {MAX_WEIGHT}"
            raise BadRequest(f"{why}: leave a model without requests out", param="weight")
    return found


class Aliases:
    """The table of one process. `follow` connects it; without that it is pure."""

    def __init__(self, now_us: Callable[[], int]) -> None:
        """`now_us`: the monotonic clock."""
        self._now_us = now_us
        self._known: dict[str, Alias] = {}  # with the deleted ones
        self._changed_us: dict[str, int] = {}
        self._resolved: dict[tuple[str, str, str], tuple[str, int]] = {}  # the oldest first
        self._bus: Bus
        self._inbox = ""
        self.on_change: Callable[[Alias], None] = lambda alias: None
        self.is_there: Callable[[str], bool] = lambda model: True  # whether a service has served it lately

    async def follow(self, bus: Bus) -> None:
        """Take changes from now on."""
        self._bus, self._inbox = bus, bus.new_inbox()
        await bus.subscribe(subjects.ALIAS_ALL, self._on_change)
        await bus.subscribe(self._inbox, self._on_table)

    async def answer(self) -> Subscription:
        """Give the table to those that ask for it."""
        return await self._bus.subscribe(subjects.ALIASES, self._on_asked)

    def ask(self) -> None:
        """Ask the other holders for their tables."""
        self._bus.publish(subjects.ALIASES, b"", reply=self._inbox)

    def catch_up(self, stamp: int) -> None:
        """Ask for the table of the tokenizers if one of them has reported a higher stamp."""
        if stamp > self.stamp:
            self.ask()

    @property
    def stamp(self) -> int:
        """Grows with each change that this table takes."""
        return sum(alias.version for alias in self._known.values())

    def has_room(self, name: str) -> bool:
        """True if a change of this alias would be taken."""
        return name in self._known or len(self._known) < MAX_ALIASES

    def get(self, name: str) -> Alias | None:
        """The alias of a name, None if there is none."""
        alias = self._known.get(name)
        return alias if alias is not None and alias.targets else None

    def last(self, name: str) -> Alias | None:
        """The last change of a name, also one that has deleted it."""
        return self._known.get(name)

    def every(self) -> list[Alias]:
        """The last change of each name, also of those that are deleted."""
        return [*self._known.values()]

    def all(self) -> list[Alias]:
        """The aliases, by name."""
        return [self._known[name] for name in sorted(self._known) if self._known[name].targets]

    def next(
        self,
        name: str,
        targets: Iterable[tuple[str, int]],
        now_wall_us: int,
        adapter: AdapterFiles | None = None,
    ) -> Alias:
        """The change of an alias, or of an adapter."""
        known = self._known.get(name)
        version = max(now_wall_us, known.version + 1 if known is not None else 0)
        return Alias(name, version, tuple(targets), adapter)

    def adapter(self, name: str, tenant: str) -> tuple[str, AdapterFiles] | None:
        """The model of an adapter and its files; None: no adapter has this name. Raises UnknownModel for one
        that was removed, or that is another tenant's."""
        known = self._known.get(name)
        if known is None or known.adapter is None:
            return None
        if not known.targets or known.adapter.tenant not in ("", tenant):
            raise UnknownModel(f"there is no model {name!r:.80}", param="model")
        return known.main, known.adapter

    def apply(self, alias: Alias) -> bool:
        """Take a change. False if this table has a newer one, or no room."""
        known = self._known.get(alias.name)
        if (known is not None and known.version >= alias.version) or not self.has_room(alias.name):
            return False
        self._known[alias.name] = alias
        self._changed_us[alias.name] = self._now_us()
        self.on_change(alias)
        return True

    def apply_all(self, data: bytes) -> None:
        """Take a table of another process; one in the form of another version is left out."""
        try:
            changes = bodies.decode(list[Alias], data)
        except WireError as error:
            log.warning("aliases of another version are left out: %s", error)
            return
        for alias in changes:
            self.apply(alias)

    def pack(self) -> bytes:
        """The table, for `apply_all`."""
        return bodies.encode([asdict(alias) for alias in self.every()])

    def resolve(self, name: str, tenant: str, request: str) -> str | None:
        """The model for a request to an alias; None if there is none of this name."""
        key, now_us = (name, tenant, request), self._now_us()
        known = self._resolved.get(key)
        if known is not None and now_us - known[1] < REMEMBERED_US and self.is_there(known[0]):
            return known[0]
        if (alias := self.get(name)) is None:
            return None
        self._resolved.pop(key, None)
        self._resolved[key] = alias.among(self.is_there).model_for(tenant, request), now_us
        if len(self._resolved) > REMEMBERED:
            del self._resolved[next(iter(self._resolved))]
        return self._resolved[key][0]

    def is_settled(self, name: str, since_us: int) -> bool:
        """True if all holders have resolved a name alike since `since_us`."""
        return self._changed_us.get(name, -SETTLED_US) <= since_us - SETTLED_US

    def _on_asked(self, delivery: Delivery) -> None:
        if access.can_answer(self._bus, delivery):
            self._bus.publish(delivery.reply, self.pack())

    def _on_change(self, delivery: Delivery) -> None:
        self.apply_all(b"[%b]" % delivery.data)

    def _on_table(self, delivery: Delivery) -> None:
        if not delivery.has_no_responders:
            self.apply_all(delivery.data)
