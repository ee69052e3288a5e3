"""The life of an actor on MemoryBus: states in beats, failure, drain, status, discovery, its mailbox."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shared import codec, subjects
from shared.actor import Actor, Facts, Runtime
from shared.bus import BusFault
from shared.clock import FakeClock
from shared.codec import Envelope
from shared.errors import PayloadTooLarge, SetupError, WireError
from shared.memory_bus import MemoryBroker
from shared.messages import Accepted, Beat, Cancel, Message, Resend, StreamReset
from shared.peers import Peer
from shared.port import RETIRED_US, Port

INTERVAL_US = 3_600_000_000  # an hour by the fake clock; nothing beats by itself


class Recorder(Actor):
    """Writes down what it is told."""

    def __init__(self, kind: str = "executor") -> None:
        self.kind = kind
        self.told: list[tuple[str, str]] = []
        self.port: Port | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.fail_on = ""

    async def start(self, port: Port) -> None:
        self.port = port
        self._note("start", "")
        await self.gate.wait()

    def _note(self, what: str, about: str) -> None:
        self.told.append((what, about))
        if what == self.fail_on:
            raise RuntimeError(f"broken in {what}")

    def receive(self, source: str, message: Message, trace: str) -> None:
        assert isinstance(message, Cancel)
        self._note("receive", message.request + trace)

    def on_peer(self, peer: Peer) -> None:
        self._note("peer", f"{peer.source} {peer.beat.state}")

    def on_peer_gone(self, peer: Peer) -> None:
        self._note("gone", peer.source)

    def on_restart(self, source: str) -> None:
        self._note("restart", source)

    def on_stream_lost(self, source: str) -> None:
        self._note("lost", source)

    def facts(self) -> Facts:
        self._note("facts", "")
        return Facts(model="m", load=(("rows", 3),))

    def status(self) -> dict[str, object]:
        return {"slots": 4}

    async def drain(self) -> None:
        self._note("drain", "")
        await self.gate.wait()

    async def stop(self) -> None:
        self._note("stop", "")

    def of(self, *what: str) -> list[str]:
        return [about for name, about in self.told if name in what]


class Fleet:
    def __init__(self) -> None:
        self.broker, self.clock = MemoryBroker(), FakeClock()
        self.beats: list[tuple[str, str]] = []
        self.runtimes: list[Runtime] = []
        self.outside = self.broker.connect()

    def runtime(self, actor: Actor, actor_id: str = "a") -> Runtime:
        self.clock.advance(1)
        bus = self.broker.connect()
        runtime = Runtime(actor, bus, "f", actor_id, "host", self.clock, INTERVAL_US)
        self.runtimes.append(runtime)
        return runtime

    async def started(self, actor: Actor, actor_id: str = "a") -> Runtime:
        runtime = self.runtime(actor, actor_id)
        await runtime.start()
        await self.broker.settle()
        return runtime

    async def ask(self, subject: str) -> dict[str, Any]:
        answer = await self.outside.request(subject, b"", timeout_us=1_000_000)
        body: dict[str, Any] = json.loads(answer.data)
        return body

    def put(self, envelope: Envelope, to: str = "executor.a") -> None:
        kind, _, actor = to.partition(".")
        name = type(envelope.message).__name__
        self.outside.publish(subjects.mailbox("f", kind, actor, name), codec.encode(envelope))


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    fleet = Fleet()

    def on_beat(delivery: Any) -> None:
        with contextlib.suppress(WireError):
            beat = codec.decode(delivery.data).message
            if isinstance(beat, Beat):
                fleet.beats.append((f"{beat.kind}.{beat.actor}", beat.state))

    await fleet.outside.subscribe("hr.f.beat.*.*", on_beat)
    yield fleet
    for runtime in fleet.runtimes:
        await runtime.finish(1.0)


def cancel(name: str) -> Cancel:
    return Cancel(tenant="t", request=name)


async def test_beats_tell_the_states_of_a_life(fleet: Fleet) -> None:
    actor = Recorder()
    actor.gate.clear()
    starting = asyncio.create_task(fleet.started(actor))
    await fleet.broker.settle()
    actor.gate.set()
    runtime = await starting
    await runtime.finish(1.0)
    await fleet.broker.settle()
    states = [state for _, state in fleet.beats]
    assert states == ["starting", "ready", "draining", "stopped"]
    assert runtime.state == "stopped"
    assert [what for what, _ in actor.told if what in ("start", "drain", "stop")] == [
        "start",
        "drain",
        "stop",
    ]
    assert fleet.broker.subscriptions == [s for s in fleet.broker.subscriptions if s.pattern[2] == "beat"]


async def test_finishing_twice_stops_once(fleet: Fleet) -> None:
    actor = Recorder()
    runtime = await fleet.started(actor)
    await runtime.finish(1.0)
    await runtime.finish(1.0)
    assert len(actor.of("stop")) == 1


async def test_a_beat_carries_the_facts(fleet: Fleet) -> None:
    watcher = Recorder("scheduler")
    seen = await fleet.started(watcher, "s")
    await fleet.started(Recorder())
    peer = seen.port.peers.get("executor.a")
    assert peer is not None
    assert (peer.beat.model, peer.beat.load, peer.beat.host_id) == ("m", (("rows", 3),), "host")
    assert watcher.of("peer") == [
        "scheduler.s ready",
        "executor.a ready",
    ]


async def test_a_newcomer_hears_at_once_who_is_there(fleet: Fleet) -> None:
    await fleet.started(Recorder(), "old")
    newcomer = await fleet.started(Recorder("scheduler"), "new")
    assert newcomer.port.peers.ready("executor") == ["old"]


async def test_handlers_wait_for_start_but_not_for_ready(fleet: Fleet) -> None:
    actor = Recorder()
    actor.gate.clear()
    runtime = fleet.runtime(actor)
    fleet.put(Envelope("scheduler.s", 1, 1, cancel("early")))
    starting = asyncio.create_task(runtime.start())
    await fleet.broker.settle()
    fleet.put(Envelope("scheduler.s", 1, 1, cancel("early")))
    await fleet.broker.settle()
    told = [what for what, _ in actor.told]
    assert told[0] == "start"
    assert actor.of("receive") == ["early"]
    assert (await fleet.ask(subjects.STATUS))["state"] == "starting"
    actor.gate.set()
    await starting
    assert runtime.state == "ready"


async def test_what_arrives_while_subscribing_is_kept_for_after_start(fleet: Fleet) -> None:
    actor = Recorder()
    runtime = fleet.runtime(actor)
    deliver = runtime._guarded(actor.receive)
    deliver("scheduler.s", cancel("one"), "")
    deliver("scheduler.s", cancel("two"), "-trace")
    assert actor.told == []
    assert runtime._status() == {}
    runtime.beat()
    assert actor.told == [], "facts are not asked for before start"
    await runtime.start()
    await fleet.broker.settle()
    assert actor.told[0] == ("start", "")
    assert actor.of("receive") == ["one", "two-trace"]


@pytest.mark.parametrize("handler", ["receive", "peer", "lost", "restart"])
async def test_an_exception_in_a_handler_fails_the_actor(fleet: Fleet, handler: str) -> None:
    actor = Recorder()
    runtime = await fleet.started(actor)
    actor.fail_on = handler
    fleet.put(Envelope("scheduler.s", 1, 1, cancel("one")))
    fleet.put(Envelope("scheduler.s", 1, 0, StreamReset(next_seq=9)))
    fleet.put(Envelope("scheduler.s", 2, 1, cancel("two")))
    await fleet.started(Recorder("scheduler"), "s")
    error = await asyncio.wait_for(runtime.failed(), 10)
    assert str(error) == f"broken in {handler}"
    told = len(actor.of("receive", "peer", "lost", "restart"))
    fleet.put(Envelope("scheduler.s", 2, 2, cancel("three")))
    await fleet.broker.settle()
    assert len(actor.of("receive", "peer", "lost", "restart")) == told, "a failed actor handles nothing more"
    assert await fleet.ask(f"$SRV.STATS.headrace-executor.{runtime.actor_id}")
    await runtime.finish(1.0)
    await runtime.finish(1.0)
    await fleet.broker.settle()
    assert actor.of("drain") == []
    assert actor.of("stop") == [""]
    assert [state for who, state in fleet.beats if who == "executor.a"][-1] == "failed"


@pytest.mark.parametrize("moment", ["drain", "stop"])
async def test_an_exception_while_ending_is_a_failure_and_the_rest_runs(fleet: Fleet, moment: str) -> None:
    actor = Recorder()
    runtime = await fleet.started(actor)
    actor.fail_on = moment
    await runtime.finish(1.0)
    await fleet.broker.settle()
    assert str(runtime.failure) == f"broken in {moment}"
    assert actor.of("stop") == [""]
    assert fleet.beats[-1] == ("executor.a", "failed")
    assert all(s.pattern[2] == "beat" for s in fleet.broker.subscriptions)


async def test_drain_has_a_time_limit(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    actor = Recorder()
    runtime = await fleet.started(actor)
    actor.gate.clear()
    await runtime.finish(0.01)
    assert "executor.a did not drain within 0.01 s" in caplog.text
    assert (runtime.state, runtime.failure) == ("stopped", None)
    assert actor.of("stop") == [""]


async def test_a_setup_error_is_told_without_a_traceback(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = fleet.runtime(Recorder())
    runtime.fail(SetupError("no model: run headrace pull"))
    runtime.fail(RuntimeError("a later error"))
    assert isinstance(runtime.failure, SetupError)
    assert "executor.a cannot start: no model: run headrace pull" in caplog.text
    assert "Traceback" not in caplog.text


async def test_status_and_discovery_answers(fleet: Fleet) -> None:
    runtime = await fleet.started(Recorder())
    epoch = runtime.port.epoch
    assert await fleet.ask(subjects.STATUS) == {
        "kind": "executor", "id": "a", "epoch": epoch, "fleet": "f", "state": "ready", "slots": 4,
    }  # fmt: skip
    name = "headrace-executor"
    for subject in ("$SRV.PING", f"$SRV.PING.{name}", f"$SRV.PING.{name}.a"):
        ping = await fleet.ask(subject)
        assert ping == {
            "type": "io.nats.micro.v1.ping_response",
            "name": name,
            "id": "a",
            "version": "0.1.0",
            "metadata": {},
        }
    info = await fleet.ask("$SRV.INFO")
    assert (info["type"], info["endpoints"]) == ("io.nats.micro.v1.info_response", [])
    stats = await fleet.ask("$SRV.STATS")
    assert (stats["type"], stats["state"], stats["data"]) == (
        "io.nats.micro.v1.stats_response",
        "ready",
        {"slots": 4},
    )
    assert stats["started"] == "2023-11-14T22:13:21.000001+00:00"
    fleet.outside.publish("$SRV.PING", b"")
    fleet.outside.publish(subjects.STATUS, b"")
    await fleet.broker.settle()


async def test_bus_faults_are_logged(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    runtime = await fleet.started(Recorder())
    runtime.bus.report(BusFault("slow_consumer", "hr.f"))
    assert "executor.a: slow_consumer: hr.f" in caplog.text


async def test_damaged_or_foreign_beats_are_ignored(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    actor = Recorder()
    await fleet.started(actor)
    before = actor.of("peer")
    beat = Beat(kind="scheduler", actor="s", host_id="h", state="ready")
    for data in (
        b"junk",
        codec.encode(Envelope("scheduler.s", 1, 0, cancel("x"))),
        codec.encode(Envelope("scheduler.other", 1, 0, beat)),
    ):
        fleet.outside.publish("hr.f.beat.scheduler.s", data)
    await fleet.broker.settle()
    assert actor.of("peer") == before
    assert "dropped a beat on hr.f.beat.scheduler.s: not msgpack" in caplog.text


async def test_upkeep_forgets_who_misses_beats(fleet: Fleet) -> None:
    actor = Recorder()
    runtime = await fleet.started(actor)
    other = await fleet.started(Recorder("scheduler"), "s")
    for _ in range(3):
        fleet.clock.advance(INTERVAL_US)
        runtime.beat()
        await fleet.broker.settle()
        runtime.upkeep()
    assert actor.of("gone") == []
    fleet.clock.advance(INTERVAL_US)
    runtime.beat()
    await fleet.broker.settle()
    runtime.upkeep()
    assert actor.of("gone") == ["scheduler.s"]
    other.beat()
    await fleet.broker.settle()
    assert actor.of("peer")[-1] == "scheduler.s ready"


async def test_who_was_stopped_itself_takes_nobody_for_dead(fleet: Fleet) -> None:
    actor = Recorder()
    runtime = await fleet.started(actor)
    await fleet.started(Recorder("scheduler"), "s")
    fleet.clock.advance(100 * INTERVAL_US)
    runtime.upkeep()
    fleet.clock.advance(INTERVAL_US)
    runtime.upkeep()
    assert actor.of("gone") == []


async def test_beats_and_upkeep_go_on_by_themselves(fleet: Fleet) -> None:
    actor = Recorder()
    runtime = fleet.runtime(actor)
    runtime.beat_interval_us = 1000
    await runtime.start()
    async with asyncio.timeout(10):
        while len(actor.of("facts")) < 5:
            await asyncio.sleep(0.001)
        actor.fail_on = "facts"
        error = await runtime.failed()
    assert str(error) == "broken in facts"


# ---- the mailbox -------------------------------------------------------------------------------


async def test_a_new_incarnation_is_announced_before_its_messages(fleet: Fleet) -> None:
    actor = Recorder()
    runtime = await fleet.started(actor)
    fleet.put(Envelope("scheduler.s", 5, 1, cancel("a")))
    fleet.put(Envelope("scheduler.s", 6, 1, cancel("b")))
    fleet.put(Envelope("scheduler.s", 5, 2, cancel("late")))
    await fleet.broker.settle()
    assert [t for t in actor.told if t[0] in ("receive", "restart")] == [
        ("receive", "a"),
        ("restart", "scheduler.s"),
        ("receive", "b"),
    ]
    assert runtime.port.epoch_of("scheduler.s") == 6
    assert runtime.port.epoch_of("scheduler.nobody") == 0


async def test_a_beat_of_a_new_incarnation_announces_it_as_well_and_only_once(fleet: Fleet) -> None:
    actor = Recorder()
    await fleet.started(actor)
    await fleet.started(Recorder("scheduler"), "s")
    again = await fleet.started(Recorder("scheduler"), "s")
    fleet.put(Envelope("scheduler.s", again.port.epoch, 1, cancel("a")))
    old = Beat(kind="scheduler", actor="s", host_id="h", state="draining")
    fleet.outside.publish("hr.f.beat.scheduler.s", codec.encode(Envelope("scheduler.s", 1, 0, old)))
    await fleet.broker.settle()
    assert actor.of("restart") == ["scheduler.s"]
    assert actor.of("receive") == ["a"]
    assert actor.of("peer").count("scheduler.s draining") == 0


async def test_messages_outside_a_stream_need_no_order(fleet: Fleet) -> None:
    actor = Recorder()
    await fleet.started(actor)
    fleet.put(Envelope("client.c", 1, 0, cancel("a")))
    fleet.put(Envelope("client.c", 1, 0, cancel("a")))
    await fleet.broker.settle()
    assert actor.of("receive") == ["a", "a"]


async def test_junk_in_the_mailbox_is_counted_and_dropped(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = await fleet.started(Recorder())
    fleet.outside.publish("hr.f.executor.a.in.Junk", b"junk")
    parts = list(codec.split(long_open()))
    fleet.put(Envelope("scheduler.s", 1, 1, parts[1]))
    await fleet.broker.settle()
    assert runtime.port.wire_errors == 2
    assert "dropped 4 bytes on hr.f.executor.a.in.Junk" in caplog.text
    assert "dropped a message of scheduler.s: part 1 of Open does not follow" in caplog.text


def long_open() -> Message:
    from shared.messages import Open, ints

    return Open(seq=1, request="r", attempt=0, tenant="t", model="m", inbox="i", tokens=ints(range(20_000)))


async def test_a_message_over_the_limit_is_refused_before_it_takes_a_number(fleet: Fleet) -> None:
    sender = await fleet.started(Recorder("scheduler"), "s")
    receiver = Recorder()
    await fleet.started(receiver)
    with pytest.raises(PayloadTooLarge):
        sender.port.send("executor.a", Accepted(tenant="t", request="r" * 70_000, attempt=0))
    sender.port.send("executor.a", cancel("next"))
    await fleet.broker.settle()
    assert receiver.of("receive") == ["next"]


async def test_a_source_that_vanished_long_ago_is_forgotten(fleet: Fleet) -> None:
    runtime = await fleet.started(Recorder())
    fleet.put(Envelope("scheduler.s", 5, 1, cancel("a")))
    await fleet.broker.settle()
    fleet.clock.advance(RETIRED_US)
    runtime.port.upkeep()
    assert runtime.port.epoch_of("scheduler.s") == 5
    fleet.clock.advance(1)
    runtime.port.upkeep()
    assert runtime.port.epoch_of("scheduler.s") == 0


async def test_a_resend_for_a_stream_that_never_was_is_answered_with_nothing(fleet: Fleet) -> None:
    actor = Recorder()
    runtime = await fleet.started(actor)
    got: list[str] = []
    await fleet.outside.subscribe("hr.f.scheduler.s.in.*", lambda d: got.append(d.subject))
    fleet.put(Envelope("scheduler.s", 5, 0, Resend(first_seq=4)))
    await fleet.broker.settle()
    runtime.port.forget("scheduler.nobody")
    assert got == []


async def test_the_default_actor_does_nothing(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    actor = Actor()
    actor.kind = "executor"
    runtime = await fleet.started(actor)
    fleet.put(Envelope("scheduler.s", 1, 1, cancel("a")))
    fleet.put(Envelope("scheduler.s", 2, 1, cancel("a")))
    actor.on_peer_gone(Peer("scheduler.s", 1, Beat(kind="s", actor="s", host_id="h", state="ready"), 0))
    actor.on_stream_lost("scheduler.s")
    await fleet.broker.settle()
    assert (actor.facts(), actor.status()) == (Facts(), {})
    await runtime.finish(1.0)
    assert runtime.failure is None
    assert caplog.text == ""
