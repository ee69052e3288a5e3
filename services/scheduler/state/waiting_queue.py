"""`WaitingQueue` has a queue for each model and class, and in it a queue for each client.

    queue (model, level):   preempted, by arrival  ▸  clients ── groups by arrival
                                                     └── heap of each client's first group, by rank
Only first groups are compared, so a decision takes O(log clients) for any number of groups. The rank is the
result of the `order` policy. It never falls while a group waits, so a heap entry is a lower bound, and is
computed again when it reaches the top.

A tenant without a running sequence comes before all others, except in the lowest class (`first`): so no
tenant can keep another one waiting by using a high class. Arrival adds groups, admission takes them.

`Quotas` limits the requests and tokens a minute of each tenant, and `read_quotas` reads them from a file.

    arrival: 1 request, tokens of the prompt ──▶ two buckets of a tenant ◀── tokens of the answer: end

A bucket holds at most a minute's amount and fills continuously. A request is accepted while both buckets hold
at least one; an answer may take the tokens below zero, and the tenant then waits until they are above. So a
quota bounds the mean, and no answer is cut short. `load_shedding` asks, `arrival` and `finish` charge.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice, zip_longest

from services.scheduler.state.policies import Policy
from services.scheduler.state.requests import CLASS_NAMES, Request, Sequence
from services.scheduler.state.transfers import LookupResult, LookupTarget
from shared.nats.subjects import MAX_NAME_CHARS, PROBE_TENANT

INPUT_WEIGHT, OUTPUT_WEIGHT = 1, 2  # of the VTC paper: a decoded token costs about as much as two of a prompt
MAX_CLIENTS = 10_000  # tenants with counters: beyond that, counters that a lift would raise are dropped
MAX_CANDIDATES = 64  # groups after the first that may start on another executor
MAX_SKIPPED = 512  # groups among these that fit nowhere: many large groups hide no small one

Client = tuple[str, int]  # tenant, and level after aging
Head = tuple[tuple[int, ...], int, Client]  # heap entry: rank and number of the client's first group


@dataclass(slots=True)
class VirtualTokenCounter:
    """Fair queueing among the clients of a class by weighted tokens: the Virtual Token Counter (Sheng et al.
    2024, arXiv 2401.00588).

    Each token served to a tenant, in any class, adds to its counters of all classes. In a class the client
    with the least counter is next. A client that becomes active is lifted to the least counter of waiting
    clients, so idle time earns no credit. Prompt tokens from the prefix cache and tokens recomputed after a
    preemption are not charged.
    """

    counters: dict[str, list[int]] = field(default_factory=dict)  # tenant -> by level
    floors: list[int] = field(default_factory=lambda: [0] * len(CLASS_NAMES))  # by level: least new counter

    def get(self, client: Client) -> int:
        """The counter of a client, in weighted tokens."""
        tenant, level = client
        counters = self.counters.get(tenant)
        return self.floors[level] if counters is None else counters[level]

    def charge_input(self, client: Client, tokens: int) -> None:
        """Charge a client for computed prompt tokens."""
        self._charge(client[0], INPUT_WEIGHT * tokens)

    def charge_output(self, client: Client, tokens: int) -> None:
        """Charge a client for generated tokens."""
        self._charge(client[0], OUTPUT_WEIGHT * tokens)

    def lift(self, client: Client, least: int | None) -> None:
        """A client becomes active: lift its counter to `least`, the counter of the first waiting client or of
        the last one that waited, so idle time earns no credit."""
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
class SequenceGroup:
    """Sequences admitted together: a fresh request with its choices, or one sequence that ran before."""

    request: Request
    sequences: list[Sequence]
    number: int  # of its first sequence
    resumes: bool = False  # it ran before, and goes before those of its class that did not
    queue: ClassQueue | None = None
    parked: bool = False
    lookup_results: dict[LookupTarget, LookupResult] = field(default_factory=dict)  # of the tiers
    lookup_since_us: int = 0  # since when it waits for a lookup at its turn
    held_executor: str = ""  # no later group may start on this executor
    held_since_us: int = 0
    overtaken: int = 0  # groups that have started there since, although this one was first
    queued_us: int = 0  # when it was queued
    max_tokens: int = 0  # as its queue has counted them: the request's may be cut while it waits

    @property
    def client(self) -> Client:
        return self.request.client

    @property
    def order(self) -> tuple[int, int]:
        return self.request.arrival_us, self.number

    @property
    def level(self) -> int:
        """Its class after aging."""
        return self.queue.level if self.queue is not None else self.request.level

    def first_choice(self) -> SequenceGroup:
        """The group with its first sequence alone."""
        if len(self.sequences) == 1:
            return self
        return SequenceGroup(self.request, self.sequences[:1], self.number)


@dataclass(slots=True, eq=False)
class ClassQueue:
    """The groups of one class of one model."""

    model: str
    level: int
    preempted: list[SequenceGroup] = field(default_factory=list)
    clients: dict[Client, OrderedDict[int, SequenceGroup]] = field(default_factory=dict)
    heads: list[Head] = field(default_factory=list)
    idle_heads: list[Head] = field(default_factory=list)  # likewise, without the `busy` clients
    busy: dict[Client, None] = field(default_factory=dict)  # clients of running tenants, at the last look
    promotions: deque[tuple[int, SequenceGroup]] = field(default_factory=deque)  # when each rises by aging
    last_client: Client | None = None  # the client of the group that left the queue last
    client_tokens: dict[Client, int] = field(default_factory=dict)  # prompt tokens of groups that never ran
    groups: int = 0
    tokens: int = 0  # prompt tokens; the choices of a request share theirs
    max_tokens: int = 0  # that one choice of each group may generate


@dataclass(slots=True)
class TenantBacklog:
    """The waiting groups of one tenant, and the tokens of all their sequences."""

    groups: int = 0
    tokens: int = 0


@dataclass(slots=True)
class WaitingQueue:
    """All waiting groups. `parked` ones fit no present executor, or wait for their adapter, and do not hold
    up others."""

    policy: Policy
    age_us: tuple[int, ...]  # by level; 0: never
    served: VirtualTokenCounter = field(default_factory=VirtualTokenCounter)
    queues: dict[tuple[str, int], ClassQueue] = field(default_factory=dict)
    parked: list[SequenceGroup] = field(default_factory=list)
    groups: dict[int, SequenceGroup] = field(default_factory=dict)  # by number
    queued_tokens: int = 0  # of all waiting sequences: they take memory
    tenants: dict[str, TenantBacklog] = field(default_factory=dict)  # tenants with a waiting group

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[SequenceGroup]:
        """All groups, in no particular order."""
        return iter(self.groups.values())

    def ahead(self, model: str, client: Client) -> tuple[int, int]:
        """Groups, and their prompt tokens, that will start before a new group of the client: all of higher
        classes, and in its own class, under a fair policy, as many of each client as it has itself."""
        level = client[1]
        higher = [queue for (name, at), queue in self.queues.items() if name == model and at < level]
        groups, tokens = sum(queue.groups for queue in higher), sum(queue.tokens for queue in higher)
        queue = self.queues.get((model, level))
        if queue is None:
            return groups, tokens
        if not self.policy.fair:
            return groups + queue.groups, tokens + queue.tokens
        own_groups, own_tokens = len(queue.clients.get(client, ())), queue.client_tokens.get(client, 0)
        groups += len(queue.preempted) + sum(min(len(of), own_groups) for of in queue.clients.values())
        tokens += queue.tokens - sum(queue.client_tokens.values())
        return groups, tokens + sum(min(of, own_tokens) for of in queue.client_tokens.values())

    def output_tokens(self, model: str, level: int, mean: int) -> int:
        """The output to expect of a group of this class or a higher one: `mean`, or less if the groups that
        wait may generate less."""
        queues = [queue for queue in self._queues(model) if queue.level <= level]
        groups = sum([queue.groups for queue in queues])
        return max(min(mean, sum([queue.max_tokens for queue in queues]) // groups), 1) if groups else mean

    def set_policy(self, policy: Policy) -> None:
        """Order the queue by another policy. Its counters start again: what was served in another order is no
        debt of the client that came first there."""
        before, self.policy = self.policy, policy
        if policy.order == before.order:
            return
        self.served = VirtualTokenCounter()
        for queue in self.queues.values():
            firsts = [(client, next(iter(groups.values()))) for client, groups in queue.clients.items()]
            queue.heads = sorted((self._order_key(group), group.number, client) for client, group in firsts)
            queue.idle_heads = queue.heads[:]

    def add(self, group: SequenceGroup, now_us: int) -> None:
        """Put a group into the queue of its class."""
        group.queued_us = group.queued_us or now_us
        self._put(group, group.request.level if group.resumes else group.client[1], now_us)

    def remove(self, group: SequenceGroup) -> None:
        """Take a group out of its queue or of the parked ones; no change if it is in neither."""
        queue, group.queue = group.queue, None
        if queue is None and not group.parked:
            return
        self._uncount(group, 1, sum([len(s.tokens) for s in group.sequences]))
        del self.groups[group.number]
        if queue is None:
            group.parked = False
            self.parked.remove(group)
            return
        queue.groups -= 1
        queue.tokens -= tokens_of(group)
        queue.max_tokens -= group.max_tokens
        if group.resumes:
            queue.preempted.remove(group)
            return
        client = group.client
        groups = queue.clients[client]
        del groups[group.number]
        queue.last_client = client
        queue.client_tokens[client] -= tokens_of(group)
        if not groups:
            del queue.clients[client], queue.client_tokens[client]
            if not queue.groups:
                for waited in (queue.heads, queue.idle_heads, queue.busy, queue.promotions):
                    waited.clear()

    def drop(self, sequence: Sequence) -> None:
        """Remove a sequence that ends while its group waits."""
        group = self.groups.get(sequence.group)
        if group is not None and sequence in group.sequences:
            if len(group.sequences) == 1:
                self.remove(group)
            else:
                self._uncount(group, 0, len(sequence.tokens))
            group.sequences.remove(sequence)

    def split(self, group: SequenceGroup, count: int) -> SequenceGroup:
        """Take the first `count` choices out of the queue; the others keep the group's position."""
        starts = SequenceGroup(
            group.request, group.sequences[:count], group.number, lookup_results=group.lookup_results
        )
        self._uncount(group, 0, sum([len(s.tokens) for s in starts.sequences]))
        before, group.sequences = group.number, group.sequences[count:]
        group.number, group.lookup_results, group.lookup_since_us = group.sequences[0].seq, {}, 0
        for sequence in group.sequences:
            sequence.group = group.number
        self.groups[group.number] = self.groups.pop(before)
        if group.queue is not None:
            clients = group.queue.clients
            renamed = ((group.number if u is group else n, u) for n, u in clients[group.client].items())
            clients[group.client] = OrderedDict(renamed)
        return starts

    def first(self, model: str, running: Container[str] | None = None) -> SequenceGroup | None:
        """The group to admit next, or None.

        With `running`: first the groups of tenants not in it, except in the lowest class. A preempted group
        of such a tenant comes after the first group of a higher class that was queued before it: it may have
        been preempted for that one.
        """
        queues = self._queues(model)
        if len(queues) == 1 and len(queues[0].clients) == 1 and not queues[0].preempted:
            (groups,) = queues[0].clients.values()  # of one client: no rank to compare
            return next(iter(groups.values()))
        firsts = (
            queue.preempted[0] if queue.preempted else self._head(queue, queue.heads) for queue in queues
        )
        head = next((group for group in firsts if group is not None), None)
        if head is None or running is None:
            return head
        for queue in queues:
            if (
                queue.level < len(CLASS_NAMES) - 1
                and (group := self._first_of_idle_tenant(queue, running)) is not None
            ):
                later = group.resumes and head.level < group.level and head.queued_us <= group.queued_us
                return head if later else group
        return head

    def candidates_after(
        self, model: str, first: SequenceGroup, fits: Callable[[SequenceGroup], bool]
    ) -> list[SequenceGroup]:
        """At most MAX_CANDIDATES other groups that fit, in order. In each class: the preempted ones, then the
        first group of each client, then the second. Skips at most MAX_SKIPPED groups that do not fit."""
        found: list[SequenceGroup] = []
        for queue in self._queues(model):
            found += [group for group in queue.preempted if fits(group)][:MAX_CANDIDATES]
            in_order = sorted(
                queue.clients.values(), key=lambda groups: self._order_key(next(iter(groups.values())))
            )
            rows = zip_longest(*(groups.values() for groups in in_order[:MAX_CANDIDATES]))
            turns = (group for row in rows for group in row if group is not None)
            fitting = filter(fits, islice(turns, MAX_CANDIDATES + MAX_SKIPPED))
            found += islice(fitting, max(MAX_CANDIDATES + 1 - len(found), 0))
        return [group for group in found if group is not first][:MAX_CANDIDATES]

    def park(self, group: SequenceGroup) -> None:
        """Set a group aside until another executor joins."""
        self.remove(group)
        group.parked = True
        self.parked.append(group)
        self.groups[group.number] = group
        self._count(group)

    def unpark(self, now_us: int, only: list[SequenceGroup] | None = None) -> None:
        """An executor has joined: queue the parked groups again; or `only` these, since their adapter is
        there."""
        parked = self.parked if only is None else only
        self.parked = [group for group in self.parked if group not in parked]
        for group in parked:
            group.parked = False
            self._uncount(group, 1, sum(len(s.tokens) for s in group.sequences))
            self.add(group, now_us)

    def promote_aged(self, now_us: int) -> None:
        """Move groups that have waited their class's `age_us` up one class."""
        for queue in list(self.queues.values()):
            while queue.promotions and queue.promotions[0][0] <= now_us:
                _, group = queue.promotions.popleft()
                if group.queue is queue:
                    self.remove(group)
                    if not group.resumes:
                        group.request.promotions += 1
                    self._put(group, queue.level - 1, now_us)

    def _count(self, group: SequenceGroup) -> None:
        held = self.tenants.setdefault(group.client[0], TenantBacklog())
        tokens = sum([len(s.tokens) for s in group.sequences])
        held.groups, held.tokens = held.groups + 1, held.tokens + tokens
        self.queued_tokens += tokens

    def _uncount(self, group: SequenceGroup, groups: int, tokens: int) -> None:
        tenant = group.client[0]
        held = self.tenants[tenant]
        held.groups, held.tokens = held.groups - groups, held.tokens - tokens
        self.queued_tokens -= tokens
        if not held.groups:
            del self.tenants[tenant]

    def _queues(self, model: str) -> list[ClassQueue]:
        """The queues of a model that are not empty, the highest class first."""
        queues = [self.queues.get((model, level)) for level in range(len(self.age_us))]
        return [queue for queue in queues if queue is not None and queue.groups]

    def _put(self, group: SequenceGroup, level: int, now_us: int) -> None:
        model = group.request.tokenized.model
        queue = self.queues.get((model, level))
        if queue is None:
            queue = self.queues[model, level] = ClassQueue(model, level)
        group.queue = queue
        self.groups[group.number] = group
        queue.groups += 1
        queue.tokens += tokens_of(group)
        group.max_tokens = group.request.tokenized.max_tokens
        queue.max_tokens += group.max_tokens
        self._count(group)
        if level and self.age_us[level]:
            queue.promotions.append((now_us + self.age_us[level], group))
            if len(queue.promotions) > 64 + 2 * queue.groups:  # most groups in it have left
                queue.promotions = deque(entry for entry in queue.promotions if entry[1].queue is queue)
        if group.resumes:
            insort(queue.preempted, group, key=lambda other: other.order)
            return
        client = group.client
        if client not in queue.clients:
            self._enter(queue, client, group)
        groups = queue.clients[client]
        late = bool(groups) and group.order < next(reversed(groups.values())).order
        groups[group.number] = group
        queue.client_tokens[client] = queue.client_tokens.get(client, 0) + tokens_of(group)
        if late:  # it has risen or was parked: it goes before later arrivals
            queue.clients[client] = OrderedDict(sorted(groups.items(), key=lambda item: item[1].order))
            self._push(queue, client, group)

    def _enter(self, queue: ClassQueue, client: Client, group: SequenceGroup) -> None:
        """A client becomes active in a class: lift its VTC counter, so idle time earns no credit."""
        first = self._head(queue, queue.heads)
        before = first.client if first is not None else queue.last_client
        self.served.lift(client, self.served.get(before) if before is not None else None)
        queue.clients[client] = OrderedDict()
        self._push(queue, client, group)

    def _push(self, queue: ClassQueue, client: Client, group: SequenceGroup) -> None:
        for heads in (queue.heads, queue.idle_heads):
            if len(heads) > 64 + 2 * len(queue.clients):  # most clients in it have left
                least = {head[2]: head for head in sorted(heads, reverse=True) if head[2] in queue.clients}
                heads[:] = sorted(least.values())
            heapq.heappush(heads, (self._order_key(group), group.number, client))

    def _first_of_idle_tenant(self, queue: ClassQueue, running: Container[str]) -> SequenceGroup | None:
        """The first group of a tenant not in `running`: a preempted one, unless the first fresh one was
        queued before it."""
        fresh = self._head(queue, queue.heads)
        if fresh is not None and fresh.client[0] in running:
            fresh = self._idle_head(queue, running)
        preempted = [group for group in queue.preempted if group.client[0] not in running]
        if not preempted:
            return fresh
        oldest = min(preempted, key=lambda group: (group.queued_us, *group.order))
        return fresh if fresh is not None and fresh.queued_us <= oldest.queued_us else oldest

    def _idle_head(self, queue: ClassQueue, running: Container[str]) -> SequenceGroup | None:
        """The first group by rank among tenants not in `running`. Clients of running tenants leave the heap
        until their tenant runs no more: so the search does not pass over all of them each time."""
        for client in [client for client in queue.busy if client[0] not in running]:
            del queue.busy[client]
            if groups := queue.clients.get(client):
                group = next(iter(groups.values()))
                heapq.heappush(queue.idle_heads, (self._order_key(group), group.number, client))
        while (first := self._head(queue, queue.idle_heads)) is not None and first.client[0] in running:
            heapq.heappop(queue.idle_heads)
            queue.busy[first.client] = None
        return first

    def _head(self, queue: ClassQueue, heads: list[Head]) -> SequenceGroup | None:
        """The first group by rank in a heap; its entry is then on top."""
        order = self.policy.function("order")
        while heads:
            head = heads[0]
            client = head[2]
            groups = queue.clients.get(client)
            if not groups:
                heapq.heappop(heads)
                continue
            group = next(iter(groups.values()))
            now = (order(*group.order, self.served.get(client)), group.number, client)
            if now == head:
                return group
            heapq.heapreplace(heads, now)
        return None

    def _order_key(self, group: SequenceGroup) -> tuple[int, ...]:
        return self.policy.function("order")(*group.order, self.served.get(group.client))  # type: ignore[no-any-return]  # policies.py


def tokens_of(group: SequenceGroup) -> int:
    """Tokens that must be in the KV cache before the group's first new one."""
    return len(group.sequences[0].tokens)


ANY_TENANT = "*"  # the quota of each tenant without a line of its own
NO_QUOTA = "-"
MINUTE_US = 60_000_000
MAX_BUCKETS = 20_000  # then those that are full are dropped: they hold nothing
QUOTA_NAMES = ("requests", "tokens")

Quota = tuple[int, int]  # requests, tokens a minute; 0: unlimited


def read_quotas(text: str) -> dict[str, Quota]:
    """The quotas by tenant. Raises ValueError with the line number."""
    found: dict[str, Quota] = {}
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.partition("#")[0].split()
        if not fields:
            continue
        amounts = [0 if amount == NO_QUOTA else int(amount) for amount in fields[1:] if _is_amount(amount)]
        if len(amounts) != 2 or len(fields) != 3 or len(fields[0]) > MAX_NAME_CHARS:
            raise ValueError(f"line {number}: `tenant requests tokens` a minute is expected, or {NO_QUOTA}")
        found[fields[0]] = amounts[0], amounts[1]
    return found


def _is_amount(text: str) -> bool:
    return text == NO_QUOTA or (text.isdecimal() and 0 < int(text) <= 10**12)


@dataclass(slots=True)
class Bucket:
    """What a tenant has left, in amounts x MINUTE_US, so that it fills in whole numbers."""

    left: list[int]
    filled_us: int


@dataclass(slots=True)
class Quotas:
    """The quotas, and what the tenants have left of them."""

    by_tenant: dict[str, Quota] = field(default_factory=dict)
    buckets: dict[str, Bucket] = field(default_factory=dict)

    def set(self, quotas: Iterable[tuple[str, int, int]]) -> None:
        """Replace the quotas; a tenant keeps what it has used."""
        self.by_tenant = {tenant: (requests, tokens) for tenant, requests, tokens in quotas}

    def wait(self, tenant: str, now_us: int) -> tuple[str, int] | None:
        """Why a request of the tenant must wait, and how long, us; None: it is accepted now."""
        quota = self._quota(tenant)
        if quota is None or tenant not in self.buckets:
            return None
        bucket = self._filled(tenant, quota, now_us)
        waits = [
            (-(-(MINUTE_US - left) // amount), f"{amount} {name} a minute")
            for left, amount, name in zip(bucket.left, quota, QUOTA_NAMES, strict=True)
            if amount and left < MINUTE_US
        ]
        if not waits:
            return None
        wait_us, what = max(waits)
        return what, wait_us

    def charge(self, tenant: str, now_us: int, requests: int, tokens: int) -> None:
        """Take from the tenant's buckets."""
        if (quota := self._quota(tenant)) is None:
            return
        if len(self.buckets) >= MAX_BUCKETS and tenant not in self.buckets:
            self._drop_full(now_us)
        bucket = self._filled(tenant, quota, now_us)
        taken = (requests if quota[0] else 0, tokens if quota[1] else 0)
        bucket.left = [left - amount * MINUTE_US for left, amount in zip(bucket.left, taken, strict=True)]

    def _quota(self, tenant: str) -> Quota | None:
        if not self.by_tenant or tenant == PROBE_TENANT:
            return None
        return self.by_tenant.get(tenant) or self.by_tenant.get(ANY_TENANT)

    def _filled(self, tenant: str, quota: Quota, now_us: int) -> Bucket:
        """The tenant's bucket, filled up to now."""
        bucket = self.buckets.get(tenant)
        if bucket is None:
            bucket = self.buckets[tenant] = Bucket([amount * MINUTE_US for amount in quota], now_us)
        since_us, bucket.filled_us = now_us - bucket.filled_us, now_us
        bucket.left = [
            min(left + amount * since_us, amount * MINUTE_US)
            for left, amount in zip(bucket.left, quota, strict=True)
        ]
        return bucket

    def _drop_full(self, now_us: int) -> None:
        for tenant in list(self.buckets):
            quota = self._quota(tenant) or (0, 0)
            if self._filled(tenant, quota, now_us).left == [amount * MINUTE_US for amount in quota]:
                del self.buckets[tenant]
