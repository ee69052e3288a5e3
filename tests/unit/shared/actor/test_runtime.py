"""The life of an actor on MemoryBus: states in heartbeats, failure, drain, status, discovery."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import weakref
from collections.abc import AsyncIterator

import pytest
from support.actor_fleet import INTERVAL_US, Fleet, Recorder, cancel, watched_fleet
from support.memory_bus import MemoryBus

from shared import codec
from shared.actor.membership import Peer
from shared.actor.runtime import Actor, HeartbeatPayload
from shared.codec import Envelope
from shared.errors import SetupError, Unavailable
from shared.messages import Heartbeat, StreamReset
from shared.nats import subjects
from shared.nats.interface import BusFault


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with watched_fleet() as fleet:
        yield fleet


async def test_heartbeats_have_the_states_of_a_life(fleet: Fleet) -> None:
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
    assert [what for what, _ in actor.events if what in ("start", "drain", "stop")] == [
        "start",
        "drain",
        "stop",
    ]
    assert fleet.broker.subscriptions == [s for s in fleet.broker.subscriptions if s.pattern[2] == "beat"]


async def test_process_settles_before_the_actor_requests_work(fleet: Fleet) -> None:
    """The first work would wait for that."""
    actor, order = Recorder(), list[str]()
    runtime = fleet.runtime(actor)
    runtime.settle = lambda: order.append(f"settled {runtime.state}")
    actor.on_ready = lambda: order.append(f"asked {runtime.state}")  # type: ignore[method-assign]
    await runtime.start()
    await fleet.broker.settle()
    assert order == ["settled starting", "asked ready"]
    assert fleet.beats[-1] == ("executor.a", "ready")


async def test_watcher_gets_each_heartbeat_and_a_report_when_the_broker_brings_none_back(
    fleet: Fleet,
) -> None:
    events: list[str] = []
    runtime = fleet.runtime(Recorder())

    def note(state: str, source: str, epoch: int) -> None:
        assert (source, epoch) == ("executor.a", runtime.mailbox.epoch)
        events.append(state)

    runtime.on_heartbeat = note
    await runtime.start()
    await fleet.broker.settle()
    fleet.broker.drop("hr.f.beat.>", times=3)
    for _ in range(5):
        fleet.clock.advance(INTERVAL_US)
        runtime.upkeep()
        runtime.send_heartbeat()
        await fleet.broker.settle()
    runtime.upkeep()
    runtime.send_heartbeat()
    await runtime.finish(1.0)
    assert [state for state, _ in itertools.groupby(events)] == [
        "ready",
        "cut_off",
        "ready",
        "draining",
        "stopped",
    ]


async def test_finishing_twice_stops_once(fleet: Fleet) -> None:
    actor = Recorder()
    runtime = await fleet.started(actor)
    await runtime.finish(1.0)
    await runtime.finish(1.0)
    assert len(actor.of("stop")) == 1


async def test_a_heartbeat_carries_the_facts(fleet: Fleet) -> None:
    watcher = Recorder("scheduler")
    seen = await fleet.started(watcher, "s")
    await fleet.started(Recorder())
    peer = seen.mailbox.peers.get("executor.a")
    assert peer is not None
    assert (peer.heartbeat.model, peer.heartbeat.load, peer.heartbeat.host_id) == (
        "m",
        (("rows", 3),),
        "host",
    )
    assert watcher.of("peer") == [
        "scheduler.s ready",
        "executor.a ready",
    ]


async def test_newcomer_gets_the_present_actors_at_once(fleet: Fleet) -> None:
    await fleet.started(Recorder(), "old")
    newcomer = await fleet.started(Recorder("scheduler"), "new")
    assert newcomer.mailbox.peers.ready("executor") == ["old"]


async def test_handlers_wait_for_start_but_not_for_ready(fleet: Fleet) -> None:
    actor = Recorder()
    actor.gate.clear()
    runtime = fleet.runtime(actor)
    fleet.put(Envelope("scheduler.s", 1, 1, cancel("early")))
    starting = asyncio.create_task(runtime.start())
    await fleet.broker.settle()
    fleet.put(Envelope("scheduler.s", 1, 1, cancel("early")))
    await fleet.broker.settle()
    events = [what for what, _ in actor.events]
    assert events[0] == "start"
    assert actor.of("receive") == ["early"]
    assert (await fleet.ask(subjects.STATUS))["state"] == "starting"
    actor.gate.set()
    await starting
    assert runtime.state == "ready"


async def test_messages_that_arrive_while_subscribing_are_kept_for_after_start(fleet: Fleet) -> None:
    actor = Recorder()
    runtime = fleet.runtime(actor)
    deliver = runtime._guarded(actor.receive)
    deliver("scheduler.s", cancel("one"), "")
    deliver("scheduler.s", cancel("two"), "-trace")
    assert actor.events == []
    assert runtime._status() == {}
    runtime.send_heartbeat()
    assert actor.events == [], "facts are not asked for before start"
    await runtime.start()
    await fleet.broker.settle()
    assert actor.events[0] == ("start", "")
    assert actor.of("receive") == ["one", "two-trace"]


async def test_a_guarded_callback_leaves_memory_when_it_has_run_without_a_collection(fleet: Fleet) -> None:
    runtime = await fleet.started(Recorder())
    gc.collect()
    gc.disable()
    try:
        timer, ran = Recorder(), list[bool]()
        runtime.mailbox.guarded(lambda timer=timer: ran.append(timer is not None))()
        left = weakref.ref(timer)
        del timer
        assert (ran, left()) == ([True], None)
    finally:
        gc.enable()


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
    events = len(actor.of("receive", "peer", "lost", "restart"))
    fleet.put(Envelope("scheduler.s", 2, 2, cancel("three")))
    await fleet.broker.settle()
    assert len(actor.of("receive", "peer", "lost", "restart")) == events, (
        "a failed actor handles nothing more"
    )
    assert await fleet.ask(f"$SRV.STATS.headrace-executor.{runtime.actor_id}")
    await runtime.finish(1.0)
    await runtime.finish(1.0)
    await fleet.broker.settle()
    assert actor.of("drain") == []
    assert actor.of("stop") == [""]
    assert [state for origin, state in fleet.beats if origin == "executor.a"][-1] == "failed"


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


async def test_setup_error_is_printed_without_a_traceback(
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
    epoch = runtime.mailbox.epoch
    fleet.clock.advance(90_000_000)
    fleet.clock.offset_us -= 3_600_000_000  # the wall clock is set
    assert await fleet.ask(subjects.STATUS) == {
        "kind": "executor", "id": "a", "epoch": epoch, "fleet": "f", "host": "host", "state": "ready",
        "age_s": 90,
        "wire_errors": 0, "last_10_s": {}, "slots": 4,
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


async def test_status_shows_how_counts_changed_within_the_last_seconds(fleet: Fleet) -> None:
    actor, done = Recorder(), 7
    actor.heartbeat_payload = lambda: HeartbeatPayload(counts={"done": done})  # type: ignore[method-assign]  # no other fact matters
    runtime = await fleet.started(actor)
    for _ in range(3):
        fleet.clock.advance(1_000_000)
        done += 5
        runtime.send_heartbeat()
    fleet.clock.advance(500_000)
    done += 1
    assert (await fleet.ask(subjects.STATUS))["last_10_s"] == {"seconds": 3.5, "done": 16}
    runtime.fail(RuntimeError("no facts any more"))
    assert (await fleet.ask(subjects.STATUS))["last_10_s"] == {"seconds": 3.5}


async def test_bus_faults_are_logged(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    runtime = await fleet.started(Recorder())
    runtime.bus.report(BusFault("overflow", "hr.f"))
    assert "executor.a: overflow: hr.f" in caplog.text


async def test_damaged_or_foreign_heartbeats_are_ignored(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    actor = Recorder()
    await fleet.started(actor)
    before = actor.of("peer")
    heartbeat = Heartbeat(kind="scheduler", actor="s", host_id="h", state="ready")
    for data in (
        b"junk",
        codec.encode(Envelope("scheduler.s", 1, 0, cancel("x"))),
        codec.encode(Envelope("scheduler.other", 1, 0, heartbeat)),
    ):
        fleet.outside.publish("hr.f.beat.scheduler.s", data)
    await fleet.broker.settle()
    assert actor.of("peer") == before
    assert "dropped a heartbeat on hr.f.beat.scheduler.s: not msgpack" in caplog.text


async def test_upkeep_forgets_actors_that_miss_heartbeats(fleet: Fleet) -> None:
    actor = Recorder()
    runtime = await fleet.started(actor)
    other = await fleet.started(Recorder("scheduler"), "s")
    for _ in range(3):
        fleet.clock.advance(INTERVAL_US)
        runtime.send_heartbeat()
        await fleet.broker.settle()
        runtime.upkeep()
    assert actor.of("gone") == []
    fleet.clock.advance(INTERVAL_US)
    runtime.send_heartbeat()
    await fleet.broker.settle()
    runtime.upkeep()
    assert actor.of("gone") == ["scheduler.s"]
    other.send_heartbeat()
    await fleet.broker.settle()
    assert actor.of("peer")[-1] == "scheduler.s ready"


async def test_an_announced_death_equals_one_by_missed_heartbeats_at_once_and_once(fleet: Fleet) -> None:
    actor = Recorder()
    await fleet.started(actor)
    dead = await fleet.started(Recorder("scheduler"), "s")
    epoch = dead.mailbox.epoch

    async def announce(number: int) -> None:
        last = Heartbeat(kind="scheduler", actor="s", host_id="h", state="failed")
        fleet.outside.publish("hr.f.beat.scheduler.s", codec.encode(Envelope("scheduler.s", number, 0, last)))
        await fleet.broker.settle()

    before = actor.of("peer")
    await announce(epoch - 1)
    assert actor.of("gone") == [], "an incarnation before this one"
    await announce(epoch)
    await announce(epoch)
    assert actor.of("gone") == ["scheduler.s"]
    dead.send_heartbeat()  # it was under way
    await fleet.broker.settle()
    assert actor.of("peer") == before
    await announce(epoch + 1)
    assert actor.of("gone") == ["scheduler.s"] * 2


async def test_actor_that_was_stopped_itself_takes_no_other_for_dead(fleet: Fleet) -> None:
    actor = Recorder()
    runtime = await fleet.started(actor)
    await fleet.started(Recorder("scheduler"), "s")
    fleet.clock.advance(100 * INTERVAL_US)
    runtime.upkeep()
    fleet.clock.advance(INTERVAL_US)
    runtime.upkeep()
    assert actor.of("gone") == []


async def test_actor_that_does_not_receive_itself_takes_no_other_for_dead(fleet: Fleet) -> None:
    actor = Recorder()
    runtime = await fleet.started(actor)
    await fleet.started(Recorder("scheduler"), "s")
    fleet.broker.drop("hr.f.beat.>", times=10)
    for _ in range(10):
        fleet.clock.advance(INTERVAL_US)
        runtime.upkeep()
        runtime.send_heartbeat()
        await fleet.broker.settle()
    assert actor.of("gone") == []
    for _ in range(5):
        fleet.clock.advance(INTERVAL_US)
        runtime.send_heartbeat()
        await fleet.broker.settle()
        runtime.upkeep()
    assert actor.of("gone") == ["scheduler.s"]


async def test_actor_that_is_cut_off_neither_requests_nor_announces(fleet: Fleet) -> None:
    """It would go the way of the message: the few announcements are for later."""
    runtime = await fleet.started(Recorder())
    other = Recorder("scheduler")
    await fleet.started(other, "s")
    fleet.broker.drop("hr.f.>", times=1 + 1 + 10)  # the message, the first announcement, the heartbeats
    runtime.mailbox.send("scheduler.s", cancel("lost"))
    for _ in range(10):
        fleet.clock.advance(INTERVAL_US)
        runtime.upkeep()
        runtime.send_heartbeat()
        await fleet.broker.settle()
    runtime.send_heartbeat()
    await fleet.broker.settle()
    runtime.upkeep()
    await fleet.broker.settle()
    assert other.of("receive") == ["lost"]


async def test_actor_gets_a_report_when_the_broker_is_cut_off_and_back(fleet: Fleet) -> None:
    actor = Recorder()
    runtime = await fleet.started(actor)
    assert isinstance(runtime.bus, MemoryBus)
    runtime.bus.report(BusFault("disconnected", "cut"))
    runtime.bus.report(BusFault("reconnected", "back"))
    runtime.bus.report(BusFault("overflow", "no news of the broker"))
    assert actor.of("broker") == ["False", "True"]


async def test_heartbeats_and_upkeep_go_on_by_themselves(fleet: Fleet) -> None:
    actor = Recorder()
    runtime = fleet.runtime(actor)
    runtime.heartbeat_interval_us = 1000
    await runtime.start()
    async with asyncio.timeout(60):
        while len(actor.of("heartbeat_payload")) < 5:
            await asyncio.sleep(0.001)
        actor.fail_on = "heartbeat_payload"
        error = await runtime.failed()
    assert str(error) == "broken in heartbeat_payload"


async def test_the_default_actor_does_nothing(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    actor = Actor()
    actor.kind = "executor"
    runtime = await fleet.started(actor)
    fleet.put(Envelope("scheduler.s", 1, 1, cancel("a")))
    fleet.put(Envelope("scheduler.s", 2, 1, cancel("a")))
    actor.on_peer_gone(Peer("scheduler.s", 1, Heartbeat(kind="s", actor="s", host_id="h", state="ready"), 0))
    actor.on_stream_lost("scheduler.s")
    await fleet.broker.settle()
    assert (actor.heartbeat_payload(), actor.status()) == (HeartbeatPayload(), {})
    await runtime.finish(1.0)
    assert runtime.failure is None
    assert caplog.text == ""


async def test_a_connection_closed_for_good_fails_the_actor(fleet: Fleet) -> None:
    runtime = await fleet.started(Recorder())
    bus = runtime.bus
    assert isinstance(bus, MemoryBus)
    bus.report(BusFault("disconnected", "for a moment"))
    assert runtime.failure is None
    bus.report(BusFault("closed", "authorization violation"))
    assert isinstance(await runtime.failed(), Unavailable)
    await runtime.finish(1.0)
    assert runtime.state == "failed"
