"""The counterfactual of a log against the truth: the log comes from a virtual world, so that what another
policy would have done can be run with the true step times, too."""

from __future__ import annotations

import io
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.simulator.engine import Machine
from loadtest.simulator.hops import Hop
from loadtest.simulator.readers import Readers
from loadtest.simulator.replay.counterfactual import _column, compare
from loadtest.simulator.replay.history import read_history
from loadtest.simulator.replay.rerun import rerun
from loadtest.simulator.requests import SimRequest, Workload, plain_prompt
from loadtest.simulator.world import Setup, World
from services.launcher.cli import main
from services.scheduler.reports import event_log
from services.scheduler.reports.event_log import LogError, Recorder
from services.scheduler.state import policies
from services.scheduler.state.state import Limits
from shared.errors import SetupError
from shared.step_model import H200_8B

REST = "routing=ttft,tier=tiered,roles=colocated,sessions=learned"
MACHINE = Machine(model=H200_8B, slots=32, blocks=4_000, hop=Hop(delay_us=700))
LIMITS = Limits(overlap="run_ahead", policy=policies.parse("order=fcfs,reservation=reserve"))


class Kept(io.BytesIO):
    """A sink in memory."""

    def begin(self) -> None: ...

    def write(self, data: bytes, now_us: int = 0) -> int:  # type: ignore[override]  # a Sink is asked for
        return super().write(data)

    def flush(self, now_us: int = 0) -> None: ...

    def close(self) -> None: ...


def workload(seed: int = 3, requests: int = 150) -> Workload:
    draw, at_us, asked = random.Random(seed), 0, []
    for i in range(requests):
        at_us += int(draw.expovariate(1 / 30_000))
        output = draw.randrange(5, 120)
        asked.append(
            SimRequest(
                request=f"r{i}",
                arrival_us=at_us,
                prompt=plain_prompt(i, draw.choice([100, 400, 2_000])),
                output_tokens=output,
                max_tokens=draw.choice([output, 500]),
                slo_class=draw.choice(["interactive", "standard", "batch"]),
                tenant=draw.choice(["a", "b"]),
            )
        )
    return Workload(tuple(asked))


def run(
    limits: Limits, sink: Kept | None = None, changes: tuple[tuple[int, str], ...] = ()
) -> tuple[World, Readers]:
    setup = Setup(machines=(MACHINE,), limits=limits, seed=5, policies=changes)
    world = World(setup, workload())
    if sink is not None:
        world.scheduler = Recorder(world.scheduler, sink, {"scheduler": "s"})  # type: ignore[assignment]  # same door
    return world, world.run()


@pytest.fixture(scope="module")
def recorded() -> tuple[bytes, Readers]:
    sink = Kept()
    _, readers = run(LIMITS, sink)
    return sink.getvalue(), readers


def records(data: bytes) -> list[event_log.Record]:
    return list(event_log.read(io.BytesIO(data)))


def test_a_recorded_run_replays(recorded: tuple[bytes, Readers]) -> None:
    report = rerun(records(recorded[0]))
    assert report.difference is None
    assert report.events > 500


def test_history_is_what_the_readers_saw(recorded: tuple[bytes, Readers]) -> None:
    history = read_history(records(recorded[0]))
    assert len(history.asked) == 150
    seen = {
        r.asked.request: (r.first_us, r.last_us, r.tokens, r.stall_us, r.reason) for r in recorded[1].records
    }
    reported = {
        r.asked.request.partition("/")[2]: (r.first_us, r.last_us, r.tokens, r.stall_us, r.reason)
        for r in history.readers.records
    }
    assert reported == seen
    (past,) = history.executors.values()
    assert {step.loop_us for step in past.steps} == {1_400}
    assert all(step.took_us == H200_8B.step_us(step.shape) for step in past.steps)


def test_the_simulation_of_the_same_policy_is_near_what_happened(recorded: tuple[bytes, Readers]) -> None:
    found = compare(records(recorded[0]), "")
    assert found.policies[0] == found.policies[1] == str(LIMITS.policy)
    assert found.same == found.changed
    for name, within in (("ttft_ms_p50", 0.1), ("tpot_ms_p50", 0.05), ("output_tok_s", 0.05)):
        assert found.same[name] == pytest.approx(found.happened[name], rel=within)
    assert found.happened["served"] == found.same["served"] == 150
    (machine,) = found.machines.values()
    assert machine["hop_us"] == 700
    assert machine["error_pct"] < 5


def test_another_policy_is_simulated_as_it_would_have_been(recorded: tuple[bytes, Readers]) -> None:
    """The truth: the same arrivals, the true step times, the other policy."""
    other = "batching=loadtest.policies:static,order=vtc"
    found = compare(records(recorded[0]), other)
    limits = replace(LIMITS, policy=policies.parse(other, LIMITS.policy))
    _, readers = run(limits)
    truth = _column(readers, 0, limits.classes)
    assert (
        found.policies[1] == f"order=vtc,{other.partition(',')[0]},reservation=reserve,victim=latest,{REST}"
    )
    for name, within in (
        ("ttft_ms_p50", 0.15),
        ("ttft_ms_p99", 0.15),
        ("tpot_ms_p50", 0.1),
        ("output_tok_s", 0.05),
    ):
        assert found.changed[name] == pytest.approx(truth[name], rel=within)
    assert found.changed["ttft_ms_p99"] > 2 * found.happened["ttft_ms_p99"], "request-level batching waits"


def test_changes_of_the_policy_are_simulated_when_they_came() -> None:
    """Slow until 2 s, and quick after that: the same in the simulation, unless the other policy is one of the
    same kind."""
    sink, slow = Kept(), "batching=loadtest.policies:static"
    run(replace(LIMITS, policy=policies.parse(slow, LIMITS.policy)), sink, ((2_000_000, "batching=mixed"),))
    assert rerun(records(sink.getvalue())).difference is None
    found = compare(records(sink.getvalue()), "routing=room")
    before, after = (
        f"order=fcfs,batching={name},reservation=reserve,victim=latest,"
        for name in ("loadtest.policies:static", "mixed")
    )
    assert found.policies[0] == f"{before}{REST}, then {after}{REST} after 2.0 s"
    assert found.same == found.changed, "one executor: there is nothing to route"
    assert found.same["ttft_ms_p50"] == pytest.approx(found.happened["ttft_ms_p50"], rel=0.1)
    all_slow = compare(records(sink.getvalue()), slow)
    assert all_slow.same == found.same
    assert all_slow.changed["ttft_ms_p50"] > 2 * found.same["ttft_ms_p50"]


def test_the_command_prints_three_columns(
    recorded: tuple[bytes, Readers], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "events.log"
    path.write_bytes(recorded[0])
    assert main(["replay", str(path), "--policy", "batching=decode_first"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "simulation of 150 requests from the log; only the first column was measured"
    other = f"order=fcfs,batching=decode_first,reservation=reserve,victim=latest,{REST}"
    assert lines[2] == f"  other policy       {other}"
    assert lines[5].split() == ["happened", "simulated", "simulated,", "other", "policy"]
    assert lines[6].split() == ["served", "150", "150", "150"]
    assert main(["replay", str(path), "--policy", "batching=decode_first", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["simulation"] is True
    assert main(["replay", str(path), "--policy", "batching=best"]) == 1
    assert "batching='best' is none of mixed" in capsys.readouterr().err


def test_a_policy_that_does_not_exist_is_refused(recorded: tuple[bytes, Readers]) -> None:
    with pytest.raises(SetupError, match="there is no 'rule'"):
        compare(records(recorded[0]), "rule=lifo")


def test_a_log_of_nothing_has_no_counterfactual(recorded: tuple[bytes, Readers]) -> None:
    with pytest.raises(LogError, match="no request"):
        compare(records(recorded[0])[:2], "")
