"""The virtual world with executors that an autoscaler starts and stops, and clients that try again."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from support.kubernetes.autoscaler import Autoscaler

from loadtest.simulator.engine import Machine, VirtualEngine
from loadtest.simulator.readers import Record
from loadtest.simulator.requests import SimRequest, Workload
from loadtest.simulator.world import FIRST_US, Setup, World
from services.scheduler.reports import status
from services.scheduler.state.requests import Arrived, Event, PeerDraining, PeerLost, Send, Ticked
from services.scheduler.state.state import Limits
from shared.messages import Rejected

S = 1_000_000
START_S = 40  # of an executor: image, weights, kernels
AGAIN_US = 1 * S  # a keeper tries again after 1 to 15 s


@dataclass(frozen=True, slots=True)
class Look:
    """KEDA looks at the metrics."""


@dataclass(frozen=True, slots=True)
class Started:
    """An executor has loaded its model."""

    name: str


class ElasticWorld(World):
    """`history` has (second, replicas, terms) of each look; `refused` counts refusals by code."""

    def __init__(
        self,
        machine: Machine,
        autoscaler: Autoscaler,
        workload: Workload,
        until_s: int,
        *,
        durable: bool = True,
        limits: Limits | None = None,
    ) -> None:
        self.machine, self.autoscaler, self.durable = machine, autoscaler, durable
        self.history: list[tuple[float, int, status.Terms]] = []
        self.refused = Counter[int]()
        self.unanswered = {asked.request for asked in workload.requests}
        self._submitted: set[str] = set()
        self.pods: dict[str, str] = {}  # name -> starting, serving, draining
        self._numbers = 0
        self._until_us = FIRST_US + until_s * S
        super().__init__(Setup((), limits or Limits()), workload)
        self._push(FIRST_US, Look())  # type: ignore[arg-type]  # an event of this world alone

    def _prepared(self, event: Event | SimRequest) -> Event:
        if isinstance(event, Look):
            return self._look()
        if isinstance(event, Started):
            if self.pods.get(event.name) != "starting":
                return Ticked()
            self.pods[event.name] = "serving"
            self._numbers += 1
            engine = VirtualEngine(event.name, self.machine, self._numbers, self._output_tokens)
            self.engines[event.name] = engine
            return Arrived(f"executor.{event.name}", engine.hello)
        if isinstance(event, SimRequest):
            self._submitted.add(event.request)
        return super()._prepared(event)

    def _carry_out(self, command: Send) -> None:
        if isinstance(rejected := command.message, Rejected):
            self.refused[rejected.code] += 1
            assert rejected.code in (429, 503), rejected
            asked, *_ = self._live.pop(rejected.request)
            self._push(self.now_us + max(AGAIN_US, 1_000 * rejected.retry_after_ms), asked)
            return
        super()._carry_out(command)

    def _choice_ended(self, record: Record) -> None:
        super()._choice_ended(record)
        if record.served:
            assert record.asked.request in self.unanswered, "answered twice"
            self.unanswered.remove(record.asked.request)
        else:  # it has waited too long
            self.refused[record.code] += 1
            self._push(self.now_us + AGAIN_US, record.asked)

    def _look(self) -> Event:
        now_s = (self.now_us - FIRST_US) / S
        terms = status.executors_wanted(self.scheduler.state)
        queued = self.durable and not self._submitted.isdisjoint(self.unanswered)
        replicas = self.autoscaler.tick(now_s, [max(terms.values()), int(queued)])
        self.history.append((now_s, replicas, terms))
        self._match(replicas)
        if self.now_us < self._until_us:
            self._push(self.now_us + self.autoscaler.spec["pollingInterval"] * S, Look())  # type: ignore[arg-type]
        return Ticked()

    def _match(self, replicas: int) -> None:
        """Start and stop executors. A drained one ends when it has nothing left to compute."""
        state = self.scheduler.state
        for name in [name for name, phase in self.pods.items() if phase == "draining"]:
            executor = state.executors.get(name)
            if executor is None or not (executor.running or executor.in_flight):
                self._handle(PeerLost("executor", name, died=False))
                del self.pods[name]
        wanted = [name for name, phase in self.pods.items() if phase != "draining"]
        for _ in range(replicas - len(wanted)):
            self._numbers += 1
            self.pods[name := f"pod{self._numbers}"] = "starting"
            self._push(self.now_us + START_S * S, Started(name))  # type: ignore[arg-type]
        for name in reversed(wanted[replicas:]):
            if self.pods[name] == "starting":
                del self.pods[name]
                continue
            self.pods[name] = "draining"
            self._handle(PeerDraining("executor", name))
