"""`headrace shadow`: a recorded log comes over NATS again, and is compared while it comes."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest
from support.memory_bus import MemoryBroker

from loadtest.simulator.command import compared, shadow
from loadtest.simulator.engine import Machine
from loadtest.simulator.replay.counterfactual import compare
from loadtest.simulator.requests import SimRequest, Workload, plain_prompt
from loadtest.simulator.world import Setup, World
from services.launcher.cli import main
from services.launcher.commands.record import REPORTS_IN_A_STRETCH, Stretches, follow
from services.scheduler.reports import event_log
from services.scheduler.reports.event_log import BEGINS_HEADER, OFFSET_HEADER, BusSink, FileSink, Recorder
from shared.errors import Unavailable
from shared.nats import subjects
from shared.nats.interface import Bus, Delivery
from shared.step_model import H200_8B

OTHER = "batching=loadtest.policies:static"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The log of 30 requests on one virtual H200."""
    asked = [
        SimRequest(f"r{i}", 20_000 * i, plain_prompt(i, 300), output_tokens=30, max_tokens=100)
        for i in range(30)
    ]
    world = World(Setup((Machine(model=H200_8B, slots=8, blocks=400),)), Workload(tuple(asked)))
    path: Path = tmp_path_factory.mktemp("log") / "events.log"
    recorder = Recorder(world.scheduler, FileSink(path), {"scheduler": "s"})
    world.scheduler = recorder  # type: ignore[assignment]  # it stands in the place of the core
    world.run()
    recorder.close()
    return path.read_bytes()


class Publisher:
    """A scheduler that publishes a log, a stretch for each request for a snapshot."""

    def __init__(self, bus: Bus, log: bytes) -> None:
        self.bus, self.log, self.asked, self.holes = bus, log, 0, 0
        self.sink = BusSink(bus, subjects.events("s"))

    def on_asked(self, asked: Delivery) -> None:
        self.asked += 1
        self.sink.begin()
        self.sink.write(self.log, 0)
        self.sink.push()
        if self.asked <= self.holes:
            self.bus.publish(subjects.events("s"), b"x", headers={OFFSET_HEADER: "1"})
        self.bus.publish(asked.reply, b"")


async def followed(log: bytes, reports: int, holes: int = 0) -> tuple[Publisher, list[list[str]]]:
    """What comes out until Ctrl-C, after so many reports."""
    broker, made, enough = MemoryBroker(), list[list[str]](), asyncio.Event()
    publisher = Publisher(broker.connect(), log)
    publisher.holes = holes
    await publisher.bus.subscribe(subjects.events_snapshot("s"), publisher.on_asked)
    lines, loop = shadow(OTHER), asyncio.get_running_loop()

    def report(data: bytes) -> list[str]:
        made.append(lines(data))
        if len(made) == reports:
            loop.call_soon_threadsafe(enough.set)
        return made[-1]

    following = asyncio.create_task(follow(broker.connect(), "s", 0, report))
    await enough.wait()
    following.cancel()
    await following
    return publisher, made


async def test_both_columns_are_printed_while_the_log_arrives_and_at_the_end(
    recorded: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same lines as `headrace replay --policy` prints of a file."""
    publisher, made = await followed(recorded, 2)
    want = compared(compare(event_log.read(io.BytesIO(recorded)), OTHER).body)
    assert made[0] == want
    assert "simulation of 30 requests from the log; only the first column was measured" in want[0]
    assert want[5].split() == ["happened", "simulated", "simulated,", "other", "policy"]
    assert len(made) >= 3, "Ctrl-C prints the last one"
    assert capsys.readouterr().out.startswith("\n".join([*want, ""]))
    assert publisher.asked >= 2, "a log that stands still is asked whether its scheduler lives"


async def test_a_lost_piece_begins_the_comparison_again(
    recorded: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    _, made = await followed(recorded, 2, holes=1)
    assert capsys.readouterr().out.count("the comparison begins again") == 1
    assert made[1] == made[0] != []


async def test_ended_scheduler_is_reported() -> None:
    with pytest.raises(Unavailable, match="no scheduler s publishes an event log"):
        await follow(MemoryBroker().connect(), "s", 0, shadow(OTHER))


def test_two_stretches_are_kept() -> None:
    assert REPORTS_IN_A_STRETCH > 1
    kept, at = Stretches(), 0
    for data, begins in (
        (b"a", True),
        (b"b", False),
        (b"c", True),
        (b"d", False),
        (b"e", True),
        (b"f", False),
    ):
        headers = {OFFSET_HEADER: str(at)} | ({BEGINS_HEADER: "1"} if begins else {})
        kept.on_piece(Delivery("s", data, headers=headers))
        at += len(data)
    assert (kept.data, kept.size) == (b"cdef", 6)
    kept.on_piece(Delivery("s", b"z", headers={OFFSET_HEADER: "77"}))
    assert kept.recording.broken.is_set()
    assert kept.data == b"cdef"


def test_empty_comparison_is_no_error() -> None:
    assert shadow(OTHER)(b"") == [
        "nothing to compare yet: the log has no snapshot or no request after it: record while some are served"
    ]


def test_a_policy_that_does_not_exist_is_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shadow", "--policy", "batching=best"]) == 1
    assert "batching='best' is none of mixed" in capsys.readouterr().err
