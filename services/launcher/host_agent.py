"""`HostAgent` loads and unloads the models of `headrace up`, and has those that share memory sleep and wake.

    heartbeats ──▶ MemoryRule, once a second ──sleep, wake──▶ the model's schedulers ──▶ its executors here
    operator ──load, unload──▶ agent ──▶ starts, or drains and ends, the executor processes of a model

An engine that cannot sleep, one of several ranks, is unloaded instead, and loaded again. A model that an
operator has unloaded stays so until it is loaded by name.

`MemoryRule` decides which models of a machine are awake while they share its memory. Pure.

    asleep, requests wait ──fits──▶ Wake
                          ──does not fit, and its work beats that of awake models──▶ Sleep them, then Wake

Work is what waits and runs, in tokens, times the priority of its class. A model stays awake for at least
LEAST_AWAKE_US, and a request that has waited for MOST_WAIT_US beats any work: so two busy models take turns
of 30 to 60 s, and neither starves. `HostAgent` calls it once a second.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from services.launcher.supervisor import ASLEEP, CHANGING, LOADED, UNLOADED, ExecutorProcesses
from shared import codec, errors
from shared.actor import membership
from shared.actor.membership import Peers
from shared.clock import Clock
from shared.messages import Heartbeat
from shared.nats import access, subjects
from shared.nats.interface import Bus, Delivery, NoResponders, RequestTimeout
from shared.replies import to_json

DECIDE_S = 1.0
ASK_US = 5_000_000  # a scheduler answers between two events
CHANGE_US = 90_000_000  # a drain of 10 s and large weights: then what was asked for counts as not done
MOST_RESTARTS = 2  # of an executor that ends while it loads: most often it found too little memory


@dataclass(slots=True)
class _Model:
    processes: ExecutorProcesses
    held: bool = False  # unloaded by an operator
    goal: str = ""  # LOADED or ASLEEP, while that is not reached
    until_us: int = 0
    need_mib: int = 0  # as its executors report it; 0: they have not yet
    failed: bool = False  # it is unloaded because its executors could not load it
    restarts: int = 0  # of its executors, when it was last loaded


@dataclass(slots=True)
class HostAgent:
    """One of each `up`. `awake_mib`: what awake models share; 0: no model sleeps by itself."""

    bus: Bus
    fleet: str
    host_id: str
    processes: Mapping[str, ExecutorProcesses]  # by model
    awake_mib: int
    clock: Clock
    report: Callable[[str], None]
    peers: Peers = field(default_factory=Peers)
    _models: dict[str, _Model] = field(init=False)
    _rule: MemoryRule = field(init=False)

    def __post_init__(self) -> None:
        self._models = {name: _Model(processes) for name, processes in self.processes.items()}
        self._rule = MemoryRule(self.awake_mib)

    @staticmethod
    def share(processes: Mapping[str, ExecutorProcesses], awake_mib: int) -> None:
        """Leave all models but the first one out of the start, until requests wait for them. Raises
        SetupError for one that never fits."""
        rule = MemoryRule(awake_mib)
        for at, (name, executors) in enumerate(processes.items()):
            if why := rule.why_not(name, executors.least_mib):
                raise errors.SetupError(why)
            if at:
                executors.stop()

    async def run(self) -> None:
        """Serve until cancelled."""
        await self.bus.subscribe(subjects.heartbeat_all(self.fleet), self._on_heartbeat)
        await self.bus.subscribe(subjects.LOAD_ALL, self._on_load)
        self.bus.publish(subjects.heartbeat_request(self.fleet), b"")
        while True:
            await asyncio.sleep(DECIDE_S)
            if self.awake_mib:
                await self.apply_rule()

    async def apply_rule(self) -> None:
        """Apply the rule once."""
        now_us = self.clock.now_us()
        self.peers.expire(now_us)
        match self._rule.decide([self._now(name, now_us) for name in self._models], now_us):
            case Sleep(name):
                await self._sleep(name)
            case Wake(name):
                await self._wake(name)

    def load(self, name: str) -> str:
        """Load a model, or let requests load it if others use its memory now. Returns its state. Raises
        UnknownModel, BadRequest for one that never fits, with the memory that it needs, and Unavailable while
        it is being unloaded."""
        model = self._known(name)
        if self.awake_mib and (why := self._rule.why_not(name, self._need_mib(model))):
            raise errors.BadRequest(why)
        if model.processes.is_ending:
            raise errors.Unavailable(f"{name} is still being unloaded: try again")
        model.held = model.failed = False
        if not model.processes.is_running:
            if self.awake_mib and self._awake_mib_of_others(name) + self._need_mib(model) > self.awake_mib:
                return UNLOADED  # the rule loads it when it has requests
            self._start(model)
        return self._now(name, self.clock.now_us()).state

    def unload(self, name: str) -> str:
        """Drain and end the executors of a model. Returns its state until then. Raises UnknownModel."""
        model = self._known(name)
        model.held = True
        if model.processes.is_running:
            model.processes.stop()
        return self._now(name, self.clock.now_us()).state

    def _known(self, name: str) -> _Model:
        if (model := self._models.get(name)) is None:
            raise errors.UnknownModel(
                f"this `headrace up` has no model {name!r:.80}: it has {', '.join(self._models)}"
            )
        return model

    def _now(self, name: str, now_us: int) -> ModelNow:
        model, loads = self._models[name], self._loads("executor", name)
        model.need_mib = max(model.need_mib, sum(load.get(membership.NEED, 0) for load in loads))
        asleep = [bool(load.get(membership.ASLEEP)) for load in loads]
        state = UNLOADED
        if model.processes.is_running or loads:
            alike = asleep and len({*asleep}) == 1
            state = (ASLEEP if asleep[0] else LOADED) if alike else CHANGING
        if model.goal and (state in (model.goal, UNLOADED) or now_us >= model.until_us):
            model.goal = ""
        if why := self._why_end(name, model, state, loads=bool(loads)):
            model.failed = True
            self.report(f"{name} is unloaded: {why}. `headrace model load {name}` tries again")
            model.processes.stop()
        if model.goal or model.processes.is_ending:
            state = CHANGING
        schedulers = self._loads("scheduler", name)
        wanted = not (model.held or model.failed)
        work = sum(load.get(membership.WORK, 0) for load in schedulers) if wanted else 0
        waits_us = max((load.get(membership.WAITS, 0) for load in schedulers), default=0)
        return ModelNow(name, state, self._need_mib(model), work, waits_us)

    def _why_end(self, name: str, model: _Model, state: str, *, loads: bool) -> str:
        """Why the executors of a model must end; empty if they go on."""
        if loads:
            model.restarts = model.processes.restarts
        if model.failed or not self.awake_mib:
            return ""
        if model.processes.restarts - model.restarts >= MOST_RESTARTS:
            return "its executor has ended each time while it loaded, see its log"
        why = self._rule.why_not(name, model.need_mib) if state == LOADED else ""
        return f"{why}: lower kv_blocks, or raise awake_gib" if why else ""

    def _need_mib(self, model: _Model) -> int:
        return model.need_mib or model.processes.least_mib

    def _awake_mib_of_others(self, name: str) -> int:
        now_us = self.clock.now_us()
        others = [self._now(other, now_us) for other in self._models if other != name]
        return sum(other.need_mib for other in others if other.state in (LOADED, CHANGING))

    def _loads(self, kind: str, model: str) -> list[dict[str, int]]:
        """The figures of the ready actors of a kind and model: executors of this machine only."""
        found = (self.peers.get(f"{kind}.{actor}") for actor in self.peers.ready(kind, model))
        beats = [peer.heartbeat for peer in found if peer is not None]
        return [dict(beat.load) for beat in beats if kind != "executor" or beat.host_id == self.host_id]

    async def _sleep(self, name: str) -> None:
        model, loads = self._models[name], self._loads("executor", name)
        if all(load.get(membership.SLEEPS) for load in loads):
            model.goal, model.until_us = ASLEEP, self.clock.now_us() + CHANGE_US
            self.report(f"{name} goes to sleep: others need its memory")
            await self._ask(name, "sleep")
        else:
            self.report(f"{name} is unloaded, since its engine cannot sleep: others need its memory")
            model.processes.stop()

    async def _wake(self, name: str) -> None:
        model = self._models[name]
        self.report(f"{name} {'wakes' if model.processes.is_running else 'is loaded'}: requests wait for it")
        if model.processes.is_running:
            model.goal, model.until_us = LOADED, self.clock.now_us() + CHANGE_US
            await self._ask(name, "wake")
        else:
            self._start(model)

    def _start(self, model: _Model) -> None:
        model.restarts = model.processes.restarts
        model.processes.start()

    async def _ask(self, name: str, what: str) -> None:
        """Request from the schedulers of a model that its executors on this machine sleep or wake."""
        ready = (self.peers.get(f"executor.{actor}") for actor in self.peers.ready("executor", name))
        here = [peer.heartbeat.actor for peer in ready if peer and peer.heartbeat.host_id == self.host_id]
        body = " ".join((what, *here)).encode()
        for scheduler in self.peers.ready("scheduler", name):
            with contextlib.suppress(NoResponders, RequestTimeout):  # the next turn tries again
                await self.bus.request(subjects.sleep(scheduler), body, timeout_us=ASK_US)

    def _on_heartbeat(self, delivery: Delivery) -> None:
        with contextlib.suppress(errors.WireError):  # a message of another version
            envelope = codec.decode(delivery.data)
            if isinstance(envelope.message, Heartbeat):
                self.peers.update(envelope.epoch, envelope.message, self.clock.now_us())

    def _on_load(self, delivery: Delivery) -> None:
        """The operator's `load` or `unload`. Only an `up` with that model answers."""
        try:
            name = subjects.name_at(delivery.subject, 3)
        except ValueError:
            return
        if name not in self._models or not access.can_answer(self.bus, delivery):
            return
        answer: dict[str, object]
        try:
            match delivery.data:
                case b"load":
                    state = self.load(name)
                case b"unload":
                    state = self.unload(name)
                case _:
                    raise errors.BadRequest("the body is neither `load` nor `unload`")
        except errors.HeadraceError as error:
            answer = errors.error_body(error)
        else:
            answer = {"state": state}
        self.bus.publish(delivery.reply, to_json({"host": self.host_id, "model": name, **answer}))


LEAST_AWAKE_US = 30_000_000  # five times the longest wake: 0.1 to 6 s, on a GPU or a CPU
MOST_WAIT_US = 60_000_000
SWAP_US = 60_000_000  # for others to fall asleep: a drain of 10 s, then copies; after it the swap is dropped


@dataclass(frozen=True, slots=True)
class ModelNow:
    """A model of this machine. `changing`: it falls asleep, wakes or loads, and counts as awake."""

    name: str
    state: str
    need_mib: int  # awake
    work: int = 0
    waits_us: int = 0  # its oldest waiting request


@dataclass(frozen=True, slots=True)
class Sleep:
    """Put a model to sleep."""

    model: str


@dataclass(frozen=True, slots=True)
class Wake:
    """Wake a model, or load it."""

    model: str


class MemoryRule:
    """The awake models of one machine and the swap that is under way."""

    def __init__(self, budget_mib: int) -> None:
        self._budget_mib = budget_mib
        self._since_us: dict[str, int] = {}  # when each loaded model was first seen awake
        self._next, self._until_us = "", 0  # the model that memory is freed for

    def why_not(self, name: str, need_mib: int) -> str:
        """Why a model can never be awake here; empty if it can."""
        if need_mib <= self._budget_mib:
            return ""
        have, need = self._budget_mib / 1024, need_mib / 1024
        return f"{name} needs {need:.1f} GiB awake, and the models here share {have:.1f} (awake_gib)"

    def decide(self, models: Sequence[ModelNow], now_us: int) -> Sleep | Wake | None:
        """What to do now. The next states of the models show whether it was done."""
        awake = [model for model in models if model.state == LOADED]
        self._since_us = {model.name: self._since_us.get(model.name, now_us) for model in awake}
        used_mib = sum(model.need_mib for model in models if model.state in (LOADED, CHANGING))
        if any(model.state == CHANGING for model in models):
            return None  # one change at a time: its memory is neither free nor taken
        if used_mib > self._budget_mib and len(awake) > 1:  # one that was restarted, or all at the start
            return Sleep(min(awake, key=lambda model: (model.work, -model.need_mib, model.name)).name)
        waiting = [
            m
            for m in models
            if m.state in (ASLEEP, UNLOADED) and m.work and not self.why_not(m.name, m.need_mib)
        ]
        if now_us >= self._until_us or self._next not in {model.name for model in waiting}:
            self._next = ""
        for model in sorted(waiting, key=lambda m: (m.name != self._next, not _is_due(m), -m.work, m.name)):
            if used_mib + model.need_mib <= self._budget_mib:
                self._next = ""
                return Wake(model.name)
            if victims := self._victims(model, awake, used_mib, now_us):
                if not self._next:
                    self._next, self._until_us = model.name, now_us + SWAP_US
                return Sleep(victims[0].name)
            if self._next:
                return None
        return None

    def _victims(
        self, model: ModelNow, awake: Sequence[ModelNow], used_mib: int, now_us: int
    ) -> list[ModelNow]:
        """The models that must sleep for this one, those with the least work; none if they are too few."""
        victims: list[ModelNow] = []
        for other in sorted(awake, key=lambda m: (m.work, m.name)):
            rested = now_us - self._since_us[other.name] >= LEAST_AWAKE_US
            if rested and (other.work < model.work or _is_due(model) or self._next == model.name):
                victims.append(other)
                used_mib -= other.need_mib
            if used_mib + model.need_mib <= self._budget_mib:
                return victims
        return []


def _is_due(model: ModelNow) -> bool:
    return model.waits_us >= MOST_WAIT_US
