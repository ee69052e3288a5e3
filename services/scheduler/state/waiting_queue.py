"""`Waiting` is the queue: a line for each model and class, in it one for each client, in the order of a rank.

    line (model, level):   paused, by arrival  ▸  clients ── units by arrival
                                                     └── heap of each client's first unit, by rank
Only first units compete, so that a decision costs O(log clients) whatever waits behind them. A rank is a
pure function of a unit and of what its client has been served (`Served`), and falls as neither moves on: a
heap entry is then a lower bound, and is looked at again when it comes up.

Classes are an order within what a tenant has: a tenant of which nothing runs comes before all others, but for
one that asks in the lowest class (`first`). So no class that one tenant claims keeps another from its turn.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from itertools import islice, zip_longest

from services.scheduler.state.policies import Policy
from services.scheduler.state.requests import NAMES, Request, Sequence
from services.scheduler.state.transfers import Answer, Place

INPUT_WEIGHT, OUTPUT_WEIGHT = 1, 2  # of the paper, see Served: a decoded token costs about two of a prompt
MAX_CLIENTS = 10_000  # tenants: then those that would be lifted anyhow are forgotten
LOOKED = 64  # units behind a first one that waits: one of them may start where that will not
SKIPPED = 512  # units that fit nowhere there: many large ones hide no small one

Client = tuple[str, int]  # tenant, and the level it counts as
Head = tuple[tuple[int, ...], int, Client]  # in a heap: rank and number of its first unit


@dataclass(slots=True)
class Served:
    """What each tenant has been served, in weighted tokens: fairness among the clients of a class by the
    Virtual Token Counter (Sheng et al. 2024, arXiv 2401.00588).

    Each token that a tenant is served, in whatever class, adds to its counters of all classes; of those that
    wait in a class the one whose counter is least is next. A client that comes back is lifted to the least
    counter of those that wait there: idleness earns no credit. Prompt tokens from the prefix cache and tokens
    computed again after our own preemption cost it nothing.
    """

    counters: dict[str, list[int]] = field(default_factory=dict)  # of each tenant, by level
    floors: list[int] = field(default_factory=lambda: [0] * len(NAMES))  # by level: nobody comes in below

    def of(self, client: Client) -> int:
        """What a client has been served."""
        tenant, level = client
        counters = self.counters.get(tenant)
        return self.floors[level] if counters is None else counters[level]

    def charge_input(self, client: Client, tokens: int) -> None:
        """Prompt tokens have been computed for a client."""
        self._charge(client[0], INPUT_WEIGHT * tokens)

    def charge_output(self, client: Client, tokens: int) -> None:
        """A client has got tokens."""
        self._charge(client[0], OUTPUT_WEIGHT * tokens)

    def lift(self, client: Client, least: int | None) -> None:
        """A client asks again after it asked for nothing; `least` is the counter of the first that waits,
        or of the last that did."""
        tenant, level = client
        floors = self.floors
        floors[level] = max(floors[level], least or 0)
        if len(self.counters) >= MAX_CLIENTS:
            ahead = {
                tenant: max(n - floor for n, floor in zip(counters, floors, strict=True))
                for tenant, counters in self.counters.items()
            }
            most = sorted((tenant for tenant in ahead if ahead[tenant] > 0), key=lambda t: (-ahead[t], t))
            self.counters = {tenant: self.counters[tenant] for tenant in most[: MAX_CLIENTS // 2]}
        counters = self.counters.setdefault(tenant, floors[:])
        counters[level] = max(counters[level], floors[level])

    def _charge(self, tenant: str, weighed: int) -> None:
        counters = self.counters.get(tenant)
        if counters is None:
            counters = self.floors
        self.counters[tenant] = [served + weighed for served in counters]


@dataclass(slots=True, eq=False)
class Unit:
    """Sequences admitted together: a fresh request with its choices, or one sequence that ran before."""

    request: Request
    sequences: list[Sequence]
    number: int  # of its first sequence
    resumes: bool = False  # it ran before: ahead of those of its class that did not
    line: Line | None = None  # where it waits
    parked: bool = False
    answers: dict[Place, Answer] = field(default_factory=dict)  # of the tiers
    turn_us: int = 0  # when it was first told to wait for one of them, at its turn
    keeps: str = ""  # the executor that nobody behind it may start on: there it will
    kept_us: int = 0  # since when
    overtaken: int = 0  # how many have started there since, although it was the first
    since_us: int = 0  # when it began to wait

    @property
    def client(self) -> Client:
        return self.request.client

    @property
    def order(self) -> tuple[int, int]:
        return self.request.arrival_us, self.number

    @property
    def level(self) -> int:
        """The class that it counts as, by now."""
        return self.line.level if self.line is not None else self.request.level


@dataclass(slots=True, eq=False)
class Line:
    """The units of one class of one model."""

    model: str
    level: int
    paused: list[Unit] = field(default_factory=list)
    clients: dict[Client, OrderedDict[int, Unit]] = field(default_factory=dict)
    heads: list[Head] = field(default_factory=list)
    idle: list[Head] = field(default_factory=list)  # likewise, but for those `aside`
    aside: dict[Client, None] = field(default_factory=dict)  # when last looked at, something ran of them
    ages: deque[tuple[int, Unit]] = field(default_factory=deque)  # when each counts as a class higher
    last: Client | None = None  # whose unit left the line last
    client_tokens: dict[Client, int] = field(default_factory=dict)  # of each that never ran
    units: int = 0
    tokens: int = 0  # prompt tokens: the choices of a request share theirs


@dataclass(slots=True)
class Held:
    """What waits of one tenant: its units, and the tokens of all their sequences."""

    units: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Waiting:
    """Every unit that waits. `parked` ones fit no executor that is there now, and hold up nobody."""

    policy: Policy
    age_us: tuple[int, ...]  # by level; 0: never
    served: Served = field(default_factory=Served)
    lines: dict[tuple[str, int], Line] = field(default_factory=dict)
    parked: list[Unit] = field(default_factory=list)
    units: dict[int, Unit] = field(default_factory=dict)  # all of them by number
    held_tokens: int = 0  # of all sequences that wait: what they take of our memory
    tenants: dict[str, Held] = field(default_factory=dict)  # those of whom something waits

    def __len__(self) -> int:
        return len(self.units)

    def __iter__(self) -> Iterator[Unit]:
        """All of them, in no order that means anything."""
        return iter(self.units.values())

    def ahead(self, model: str, client: Client) -> tuple[int, int]:
        """Units, and their prompt tokens, that will start before what the client would add now: all of higher
        classes, and of its own as much of each other client as it has itself, where they take turns."""
        level = client[1]
        higher = [line for (name, at), line in self.lines.items() if name == model and at < level]
        units, tokens = sum(line.units for line in higher), sum(line.tokens for line in higher)
        line = self.lines.get((model, level))
        if line is None:
            return units, tokens
        if not self.policy.fair:
            return units + line.units, tokens + line.tokens
        own_units, own_tokens = len(line.clients.get(client, ())), line.client_tokens.get(client, 0)
        units += len(line.paused) + sum(min(len(of), own_units) for of in line.clients.values())
        tokens += line.tokens - sum(line.client_tokens.values())
        return units, tokens + sum(min(of, own_tokens) for of in line.client_tokens.values())

    def add(self, unit: Unit, now_us: int) -> None:
        """Put a unit into the line of its class."""
        unit.since_us = unit.since_us or now_us
        self._put(unit, unit.request.level if unit.resumes else unit.client[1], now_us)

    def remove(self, unit: Unit) -> None:
        """Take a unit out, wherever it stands."""
        line, unit.line = unit.line, None
        if line is None and not unit.parked:
            return
        self._gone(unit, 1, sum([len(s.tokens) for s in unit.sequences]))
        del self.units[unit.number]
        if line is None:
            unit.parked = False
            self.parked.remove(unit)
            return
        line.units -= 1
        line.tokens -= tokens_of(unit)
        if unit.resumes:
            line.paused.remove(unit)
            return
        client = unit.client
        units = line.clients[client]
        del units[unit.number]
        line.last = client
        line.client_tokens[client] -= tokens_of(unit)
        if not units:
            del line.clients[client], line.client_tokens[client]
            if not line.units:
                for waited in (line.heads, line.idle, line.aside, line.ages):
                    waited.clear()

    def drop(self, sequence: Sequence) -> None:
        """A sequence has ended while its unit waited."""
        unit = self.units.get(sequence.unit)
        if unit is not None and sequence in unit.sequences:
            if len(unit.sequences) == 1:
                self.remove(unit)
            else:
                self._gone(unit, 0, len(sequence.tokens))
            unit.sequences.remove(sequence)

    def split(self, unit: Unit, count: int) -> Unit:
        """Take the first `count` choices out of the queue; the others wait on, in the same place."""
        begins = Unit(unit.request, unit.sequences[:count], unit.number, answers=unit.answers)
        self._gone(unit, 0, sum([len(s.tokens) for s in begins.sequences]))
        before, unit.sequences = unit.number, unit.sequences[count:]
        unit.number, unit.answers, unit.turn_us = unit.sequences[0].seq, {}, 0
        for sequence in unit.sequences:
            sequence.unit = unit.number
        self.units[unit.number] = self.units.pop(before)
        if unit.line is not None:
            clients = unit.line.clients
            renamed = ((unit.number if u is unit else n, u) for n, u in clients[unit.client].items())
            clients[unit.client] = OrderedDict(renamed)
        return begins

    def first(self, model: str, running: Container[str] | None = None) -> Unit | None:
        """The unit to admit next: of a tenant that is not among the `running` ones, unless it waits in the
        lowest class, or else of any. One that was paused comes behind the first of any in a higher class,
        where that waited before: it was paused for that one, perhaps."""
        lines = self._lines(model)
        head = next((unit for line in lines if (unit := self._first_of(line)) is not None), None)
        if head is None or running is None:
            return head
        for line in lines:
            if line.level < len(NAMES) - 1 and (unit := self._first_without(line, running)) is not None:
                behind = unit.resumes and head.level < unit.level and head.since_us <= unit.since_us
                return head if behind else unit
        return head

    def behind(self, model: str, first: Unit, fits: Callable[[Unit], bool]) -> list[Unit]:
        """Who else might start, in order, of each class: the paused ones, then the first unit of each
        client, then the second. LOOKED of them, but for those that do not fit: SKIPPED at most."""
        found: list[Unit] = []
        for line in self._lines(model):
            found += [unit for unit in line.paused if fits(unit)][:LOOKED]
            by_rank = sorted(line.clients.values(), key=lambda units: self._rank(next(iter(units.values()))))
            rows = zip_longest(*(units.values() for units in by_rank[:LOOKED]))
            turns = (unit for row in rows for unit in row if unit is not None)
            fitting = filter(fits, islice(turns, LOOKED + SKIPPED))
            found += islice(fitting, max(LOOKED + 1 - len(found), 0))
        return [unit for unit in found if unit is not first][:LOOKED]

    def park(self, unit: Unit) -> None:
        """Set a unit aside until another executor comes."""
        self.remove(unit)
        unit.parked = True
        self.parked.append(unit)
        self.units[unit.number] = unit
        self._hold(unit)

    def unpark(self, now_us: int) -> None:
        """An executor has come: those set aside are looked at again."""
        parked, self.parked = self.parked, []
        for unit in parked:
            unit.parked = False
            self._gone(unit, 1, sum(len(s.tokens) for s in unit.sequences))
            self.add(unit, now_us)

    def age(self, now_us: int) -> None:
        """Who has waited its class's time moves up one."""
        for line in list(self.lines.values()):
            while line.ages and line.ages[0][0] <= now_us:
                _, unit = line.ages.popleft()
                if unit.line is line:
                    self.remove(unit)
                    if not unit.resumes:
                        unit.request.risen += 1
                    self._put(unit, line.level - 1, now_us)

    def _hold(self, unit: Unit) -> None:
        held = self.tenants.setdefault(unit.client[0], Held())
        tokens = sum([len(s.tokens) for s in unit.sequences])
        held.units, held.tokens = held.units + 1, held.tokens + tokens
        self.held_tokens += tokens

    def _gone(self, unit: Unit, units: int, tokens: int) -> None:
        tenant = unit.client[0]
        held = self.tenants[tenant]
        held.units, held.tokens = held.units - units, held.tokens - tokens
        self.held_tokens -= tokens
        if not held.units:
            del self.tenants[tenant]

    def _lines(self, model: str) -> list[Line]:
        """Those in which somebody waits, the highest class first."""
        lines = (self.lines.get((model, level)) for level in range(len(self.age_us)))
        return [line for line in lines if line is not None and line.units]

    def _put(self, unit: Unit, level: int, now_us: int) -> None:
        model = unit.request.asked.model
        line = self.lines.get((model, level))
        if line is None:
            line = self.lines[model, level] = Line(model, level)
        unit.line = line
        self.units[unit.number] = unit
        line.units += 1
        line.tokens += tokens_of(unit)
        self._hold(unit)
        if level and self.age_us[level]:
            line.ages.append((now_us + self.age_us[level], unit))
            if len(line.ages) > 64 + 2 * line.units:  # most are of units that have left since
                line.ages = deque(entry for entry in line.ages if entry[1].line is line)
        if unit.resumes:
            insort(line.paused, unit, key=lambda paused: paused.order)
            return
        client = unit.client
        if client not in line.clients:
            self._enter(line, client, unit)
        units = line.clients[client]
        late = bool(units) and unit.order < next(reversed(units.values())).order
        units[unit.number] = unit
        line.client_tokens[client] = line.client_tokens.get(client, 0) + tokens_of(unit)
        if late:  # it has risen, or was set aside: it goes before those that came after it
            line.clients[client] = OrderedDict(sorted(units.items(), key=lambda item: item[1].order))
            self._push(line, client, unit)

    def _enter(self, line: Line, client: Client, unit: Unit) -> None:
        """A client without a unit here gets one: it has no credit for the time when it asked for nothing."""
        first = self._head_of(line, line.heads)
        before = first.client if first is not None else line.last
        self.served.lift(client, self.served.of(before) if before is not None else None)
        line.clients[client] = OrderedDict()
        self._push(line, client, unit)

    def _push(self, line: Line, client: Client, unit: Unit) -> None:
        for heads in (line.heads, line.idle):
            if len(heads) > 64 + 2 * len(line.clients):  # most are of clients that have left since
                least = {head[2]: head for head in sorted(heads, reverse=True) if head[2] in line.clients}
                heads[:] = sorted(least.values())
            heapq.heappush(heads, (self._rank(unit), unit.number, client))

    def _first_of(self, line: Line) -> Unit | None:
        return line.paused[0] if line.paused else self._head_of(line, line.heads)

    def _first_without(self, line: Line, running: Container[str]) -> Unit | None:
        """The first of a tenant that is not among the `running` ones. One that was paused for another's sake
        comes behind that one, and before those that came later."""
        fresh = self._head_of(line, line.heads)
        if fresh is not None and fresh.client[0] in running:
            fresh = self._idle_head_of(line, running)
        paused = [unit for unit in line.paused if unit.client[0] not in running]
        if not paused:
            return fresh
        oldest = min(paused, key=lambda unit: (unit.since_us, *unit.order))
        return fresh if fresh is not None and fresh.since_us <= oldest.since_us else oldest

    def _idle_head_of(self, line: Line, running: Container[str]) -> Unit | None:
        """The first unit by rank of those whose tenants are not among the `running` ones. Clients that are
        come out of the heap until they are not: so it costs no look at all that wait."""
        for client in [client for client in line.aside if client[0] not in running]:
            del line.aside[client]
            if units := line.clients.get(client):
                unit = next(iter(units.values()))
                heapq.heappush(line.idle, (self._rank(unit), unit.number, client))
        while (first := self._head_of(line, line.idle)) is not None and first.client[0] in running:
            heapq.heappop(line.idle)
            line.aside[first.client] = None
        return first

    def _head_of(self, line: Line, heads: list[Head]) -> Unit | None:
        """The first unit by rank of the clients in a heap, which is then on top."""
        rank = self.policy.the("order")
        while heads:
            head = heads[0]
            client = head[2]
            units = line.clients.get(client)
            if not units:
                heapq.heappop(heads)
                continue
            unit = next(iter(units.values()))
            now = (rank(*unit.order, self.served.of(client)), unit.number, client)
            if now == head:
                return unit
            heapq.heapreplace(heads, now)
        return None

    def _rank(self, unit: Unit) -> tuple[int, ...]:
        return self.policy.the("order")(*unit.order, self.served.of(unit.client))  # type: ignore[no-any-return]  # policies.py


def tokens_of(unit: Unit) -> int:
    """Tokens that must be in the KV cache before the unit's first new one."""
    return len(unit.sequences[0].tokens)
