"""`Peers` tracks from heartbeats which actors live. Pure: time is an argument.

A request needs a ready service of each kind in NEEDED; a real request is the proof
(shared.client.client.probe). kv_offload is not needed: without it evicted blocks are recomputed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from shared.errors import SetupError
from shared.messages import Heartbeat
from shared.telemetry.counters import SchedulerCounter

MISSED_HEARTBEATS = 3
MIN_DETECTION_US = 5_000_000  # others allow at least so long for the detection of a death, on busy machines
OWN_HEARTBEATS_LATE = 1.5  # intervals; an actor without its own heartbeats cannot judge the silence of others

BOUND = 1.25  # consistent hashing with bounded loads, Mirrokni et al. 2018, with a quarter over the mean
SLACK = 8  # requests an executor over the mean: fewer are chance, and cost a step next to nothing

NEEDED = ("tokenizer", "scheduler", "executor", "detokenizer")
VOCABULARY = "vocabulary"  # in the load of tokenizers and detokenizers
TOKENS = "tokens_number"  # there, too: of the tokens alone, which executors compare
ASLEEP = "asleep"  # in an executor's load, 1: another model may use its device memory
NEED = "memory_mib"  # in an executor's load: what it takes when it is awake
SLEEPS = "sleeps"  # in an executor's load, 1: its engine can sleep
ONLY_TIER = "only_tier"  # in an executor's load, 1: its KV cache has the memory that L1 would have
WORK, WAITS = "work", "waits_us"  # in a scheduler's load, if models share memory
COLD_START = "cold_start_wait_us"  # in a scheduler's load: without an executor it keeps requests so long
PEER_READS = "peer_reads"  # in the load of a kv_offload, 1: those of other hosts may read its L1
AGE = "age_s"  # in the load of a tokenizer or detokenizer: seconds since its start
SAME_START_S = 2  # two ages that differ by less, with the time of a heartbeat, are equal
MIXED = "accepts_mixed"  # in a scheduler's load, 1: executors with other weights or modes serve, too


@dataclass(slots=True)
class Peer:
    """One living actor."""

    source: str  # kind.id
    epoch: int
    heartbeat: Heartbeat
    last_seen_us: int

    def is_silent(self, now_us: int) -> bool:
        """Whether MISSED_HEARTBEATS heartbeats are missing."""
        return now_us - self.last_seen_us > MISSED_HEARTBEATS * self.heartbeat.interval_us


class Peers:
    """The living actors of the fleet."""

    def __init__(self) -> None:
        self._peers: dict[str, Peer] = {}
        self._ended: dict[str, Peer] = {}  # seen last at their `end`

    def update(self, epoch: int, heartbeat: Heartbeat, now_us: int) -> bool:
        """Record a heartbeat; True if the actor, its incarnation, state, arena or scheduler is new."""
        source = f"{heartbeat.kind}.{heartbeat.actor}"
        known = self._peers.get(source)
        if self._is_past(source, epoch):
            return False
        self._peers[source] = Peer(source, epoch, heartbeat, now_us)
        return (
            known is None
            or known.epoch != epoch
            or _visible_state(known.heartbeat) != _visible_state(heartbeat)
        )

    def end(self, epoch: int, heartbeat: Heartbeat, now_us: int) -> Peer | None:
        """Forget the actor that has failed by this `heartbeat`; late ones of its incarnation count no more.
        Returns what was last known of it; None if that is known already or a later incarnation lives."""
        source = f"{heartbeat.kind}.{heartbeat.actor}"
        if self._is_past(source, epoch):
            return None
        known = self._peers.pop(source, None)
        last = heartbeat if known is None else known.heartbeat
        self._ended[source] = gone = Peer(source, epoch, last, now_us)
        return gone

    def _is_past(self, source: str, epoch: int) -> bool:
        known, ended = self._peers.get(source), self._ended.get(source)
        return (ended is not None and epoch <= ended.epoch) or (known is not None and epoch < known.epoch)

    def expire(self, now_us: int) -> list[Peer]:
        """Forget and return the actors that have ended or missed MISSED_HEARTBEATS heartbeats, sorted. One of
        `end` is returned again then: a message of it that came late may have brought it back."""
        over = ("stopped", "failed")
        gone = [p for p in self._peers.values() if p.heartbeat.state in over or p.is_silent(now_us)]
        for peer in gone:
            del self._peers[peer.source]
        again = [s for s, p in self._ended.items() if p.is_silent(now_us) and s not in self._peers]
        gone += [self._ended.pop(source) for source in again]
        return sorted(gone, key=lambda p: p.source)

    def restart_timeouts(self, now_us: int, but: str = "") -> None:
        """Count every actor `but` one as seen now: this process was stopped or cut off, so their silence
        proves nothing."""
        for peer in self._peers.values():
            if peer.source != but:
                peer.last_seen_us = now_us

    def is_cut_off(self, source: str, now_us: int) -> bool:
        """True if `source`, the actor of this process, misses its own heartbeats: it is cut off, was stopped,
        or the broker is away."""
        own = self._peers.get(source)
        return own is not None and now_us - own.last_seen_us > OWN_HEARTBEATS_LATE * own.heartbeat.interval_us

    def sources(self) -> list[str]:
        """All living actors, sorted."""
        return sorted(self._peers)

    def get(self, source: str) -> Peer | None:
        """The actor `kind.id`, if alive."""
        return self._peers.get(source)

    def ready(self, kind: str, model: str = "") -> list[str]:
        """Ids of the ready actors of a kind (and model), sorted."""
        return self._in_state("ready", kind, model)

    def is_loading(self, model: str) -> bool:
        """Whether an executor starts that has this model, or has not named its model yet."""
        heartbeats = (p.heartbeat for p in self._peers.values())
        return any(
            (b.kind, b.state) == ("executor", "starting") and b.model in ("", model) for b in heartbeats
        )

    def draining(self, kind: str, model: str) -> list[str]:
        """Ids of the draining actors of a kind and model, sorted."""
        return self._in_state("draining", kind, model)

    def executors_of(self, model: str) -> Counter[str]:
        """The number of ready executors of a model by scheduler id."""
        heartbeats = (self._peers[f"executor.{actor}"].heartbeat for actor in self.ready("executor", model))
        return Counter(heartbeat.scheduler for heartbeat in heartbeats if heartbeat.scheduler)

    def serving(self, model: str) -> list[str]:
        """Ids of the schedulers to send requests to, sorted: the ready ones of a model with an executor, or
        all ready ones if none has an executor."""
        ready, served = self.ready("scheduler", model), self.executors_of(model)
        return [actor for actor in ready if served[actor]] or ready

    def crowded(self, model: str) -> list[str]:
        """Ids of the `serving` schedulers with more requests for each executor than BOUND times the mean."""
        served = self.executors_of(model)
        load = {actor: self._requests(actor) for actor in self.serving(model) if served[actor]}
        mean = sum(load.values()) / max(sum(served[actor] for actor in load), 1)
        bound = max(BOUND * mean, mean + SLACK)
        return [actor for actor, requests in load.items() if requests > bound * served[actor]]

    def models(self, kind: str) -> list[str]:
        """The models of the ready actors of a kind, sorted."""
        heartbeats = (p.heartbeat for p in self._peers.values())
        return sorted({b.model for b in heartbeats if b.kind == kind and b.state == "ready" and b.model})

    def has_model(self, name: str) -> bool:
        """Whether a ready tokenizer serves a model by this name: it goes before an alias or an adapter."""
        return name in self.models("tokenizer") or name in self.aliases()

    def aliases(self) -> dict[str, str]:
        """The models of the ready tokenizers by their further names."""
        heartbeats = (self._peers[f"tokenizer.{actor}"].heartbeat for actor in self.ready("tokenizer"))
        return {alias: heartbeat.model for heartbeat in heartbeats for alias in heartbeat.aliases}

    def model_digest(self, name: str) -> str:
        """The digest of the executors of a model, by any of its names; empty if it is not known, or if
        schedulers have different ones."""
        ready = self.ready("scheduler", self.aliases().get(name, name))
        found = {self._peers[f"scheduler.{actor}"].heartbeat.model_digest for actor in ready} - {""}
        return found.pop() if len(found) == 1 else ""

    def of_other_tokens(self, model: str, number: int) -> str:
        """The first ready tokenizer or detokenizer of a model if one of these kinds has no actor whose tokens
        have this number; older ones name none. Empty: ids mean the same to all."""
        for kind in ("detokenizer", "tokenizer"):
            ready = {f"{kind}.{actor}": self._peers[f"{kind}.{actor}"] for actor in self.ready(kind, model)}
            theirs = {dict(peer.heartbeat.load).get(TOKENS, number) for peer in ready.values()}
            if theirs and number not in theirs:
                return min(ready)
        return ""

    def model_state(self, model: str) -> str:
        """`loaded`: an executor of the model is awake; `asleep`: all of them sleep; `unloaded`: there is
        none."""
        loads = (self._peers[f"executor.{actor}"].heartbeat.load for actor in self.ready("executor", model))
        asleep = [dict(load).get(ASLEEP, 0) for load in loads]
        return "unloaded" if not asleep else "asleep" if all(asleep) else "loaded"

    def max_load(self, kind: str, figure: str, model: str) -> int:
        """The largest `figure` in the loads of the ready actors of a kind and model; 0 if there is none."""
        ready = [self._peers[f"{kind}.{actor}"].heartbeat.load for actor in self.ready(kind, model)]
        return max((dict(load).get(figure, 0) for load in ready), default=0)

    def _requests(self, scheduler: str) -> int:
        load = self._peers[f"scheduler.{scheduler}"].heartbeat.load
        return SchedulerCounter.RUNNING.loaded(load) + SchedulerCounter.WAITING_REQUESTS.loaded(load)

    def _in_state(self, state: str, kind: str, model: str) -> list[str]:
        heartbeats = (p.heartbeat for p in self._peers.values())
        found = (b for b in heartbeats if (b.kind, b.state) == (kind, state) and model in ("", b.model))
        return sorted(b.actor for b in found)


def _visible_state(heartbeat: Heartbeat) -> tuple[str, str, int, str]:
    return heartbeat.state, heartbeat.arena, heartbeat.arena_generation, heartbeat.scheduler


def detection_us(heartbeat_interval_us: int) -> int:
    """The longest time to detect a death: the last heartbeat, MISSED_HEARTBEATS, and the check for them."""
    return max(MIN_DETECTION_US, (MISSED_HEARTBEATS + 2) * heartbeat_interval_us)


def _is_earlier(peer: Peer, epoch: int, age_s: int) -> bool:
    """True if `peer` has started before this process, which is `age_s` old. Ages decide: epochs are of the
    wall clocks of two hosts, and order two that start at about the same time. Near the border between
    the two rules both processes may count as the later one, and never neither."""
    older_s = dict(peer.heartbeat.load).get(AGE, age_s) - age_s
    return older_s > SAME_START_S or (abs(older_s) <= 2 * SAME_START_S and peer.epoch < epoch)


def check_vocabulary(peer: Peer, model: str, number: int, epoch: int, age_s: int) -> None:
    """Raise SetupError in a tokenizer or detokenizer of a model if `peer`, an earlier one of its fleet, has
    another vocabulary: the ids of one would be read as the other's text. `number`: see vocabulary_number;
    `age_s`: of this process."""
    beat = peer.heartbeat
    if beat.kind in ("tokenizer", "detokenizer") and (beat.model, beat.state) == (model, "ready"):
        theirs = dict(beat.load).get(VOCABULARY, number)
        if theirs != number and _is_earlier(peer, epoch, age_s):
            raise SetupError(
                f"{peer.source} on host {beat.host_id} serves another model under the name {model!r} in this "
                "fleet: a second fleet on one nats-server needs a --fleet and a --model-name of its own"
            )


def vocabulary_number(digest: str) -> int:
    """A vocabulary in a heartbeat: the first 48 bits of its digest."""
    return int(digest[:12], 16)


def can_start_cold(peers: Peers, model: str) -> bool:
    """True if a model lacks nothing but executors, and its scheduler keeps requests until one joins."""
    return missing(peers, model) == ["executor"] and peers.max_load("scheduler", COLD_START, model) > 0


def missing(peers: Peers, model: str = "") -> list[str]:
    """The needed kinds without a ready actor (of a model)."""
    return [kind for kind in NEEDED if not peers.ready(kind, model)]
