"""Which steps become spans and what the scheduler answers about a request, on a fake clock."""

from __future__ import annotations

import dataclasses
import json

from support.scheduler.world import World

from services.scheduler.reports import status
from services.scheduler.state.counters import MAX_KEPT, MAX_LINKS, LoggedStep, StepLog, step_spans, step_trace
from services.scheduler.state.requests import MAX_CHUNKS
from shared.telemetry import traces as trace_context

TRACED = {"parent_span": trace_context.NO_PARENT}


def trace(number: int) -> str:
    return trace_context.make(f"{number:032x}", f"{number:016x}", sampled=True)


def record(step: int, at_us: int) -> LoggedStep:
    return LoggedStep(
        executor="e", step=step, planned_us=at_us - 5, result_us=at_us, start_wall_us=100, end_wall_us=190,
        forward_us=70, sample_us=20, wait_us=3, rows=4, tokens=40, prefill_tokens=37, micro_batch=0,
        mode="run_ahead", failed=False,
    )  # fmt: skip


class Asked:
    """As much of a request as the choice of steps looks at."""

    def __init__(self, number: int, *, traced: bool = True) -> None:
        self.is_traced, self.trace = traced, trace(number)


def spans_sent(steps: StepLog) -> list[tuple[int, int]]:
    return [(s.entry.step, len(s.links)) for s in steps.unsent]


def test_first_step_of_a_second_and_steps_with_chunks_become_spans() -> None:
    steps, one, two = StepLog(), Asked(1), Asked(2)
    steps.add(record(1, 10), 9, [], iter([one]))  # the first of all
    steps.add(record(2, 1_010), 9, [], iter([one]))  # decodes alone
    steps.add(record(3, 95_000), 9, [two], iter([one]))  # a chunk, but less than 100 ms after a span
    steps.add(record(4, 100_010), 9, [two], iter([one]))
    steps.add(record(5, 250_000), 9, [Asked(3, traced=False)], iter([one]))  # a chunk without a trace
    steps.add(record(6, 1_000_010), 9, [], iter([one, two, one]))  # a second later
    assert spans_sent(steps) == [(1, 1), (4, 2), (6, 2)]
    assert steps.unsent[1].links == (trace(2), trace(1))
    assert [r.step for r in steps.ring] == [1, 2, 3, 4, 5, 6]


def test_links_are_few_and_the_ring_is_bounded() -> None:
    steps = StepLog()
    steps.add(record(1, 10), 9, [], (Asked(i) for i in range(1, 100)))
    assert spans_sent(steps) == [(1, MAX_LINKS)]
    for step in range(2, 2 * MAX_KEPT):
        steps.add(record(step, step), 9, [], iter([]))
    assert len(steps.ring) == MAX_KEPT
    assert [r.step for r in steps.between({"e"}, 5_000, 5_002)] == [*range(5_000, 5_008)]
    assert steps.between({"other"}, 0, 10**9) == []


def test_step_span_has_these_attributes() -> None:
    steps = StepLog()
    steps.add(record(7, 10), 9, [], iter([Asked(1)]))
    (span,) = step_spans(steps.unsent[0])
    assert (span.name, span.start_us, span.end_us, span.links) == ("step run_ahead", 100, 190, (trace(1),))
    assert span.attributes == {
        "component": "executor.e", "executor": "e", "step": 7, "batch.id": "e:7", "overlap.mode": "run_ahead",
        "overlap.comm": "off", "micro_batch": 0, "rows": 4, "tokens": 40, "prefill_tokens": 37,
        "forward_us": 70, "sample_us": 20, "wait_us": 3,
    }  # fmt: skip
    assert trace_context.is_valid(step_trace(steps.unsent[0]))
    assert step_trace(steps.unsent[0]) == step_trace(steps.unsent[0])


def test_the_micro_batches_of_a_step_are_spans_below_it() -> None:
    steps, pieces = StepLog(), (0, 0, 10, 2, 10, 12, 1, 10, 11)
    steps.add(dataclasses.replace(record(7, 10), segments=pieces), 9, [], iter([Asked(1)]))
    whole, *halves = step_spans(steps.unsent[0])
    assert whole.attributes["overlap.comm"] == "two_stream"
    assert [(span.name, span.start_us, span.end_us, span.parent) for span in halves] == [
        ("compute A", 100, 110, 0), ("comm A", 110, 122, 0), ("compute B", 110, 121, 0)
    ]  # fmt: skip
    assert {span.attributes["component"] for span in halves} == {"executor.e"}


def test_the_answer_has_chunks_decisions_and_the_steps_of_the_requests_time() -> None:
    world = World()
    world.add_engine(max_step_tokens=8)
    world.ask("before", [3], 4)
    world.run()
    arrives_wall_us = world.now_us + 10 + 1_000
    world.ask("a", list(range(10, 30)), 4, received_wall_us=arrives_wall_us, sent_wall_us=arrives_wall_us)
    world.run()
    body = status.trace(world.scheduler.state, "a", 1_000, steps=True)
    chunks = [s for s in body["spans"] if s["name"].startswith("prefill chunk")]
    assert [s["attributes"]["tokens"] for s in chunks] == [8, 8, 4]
    first_step = chunks[0]["attributes"]["step"]
    assert [s["attributes"]["step"] for s in chunks] == [first_step, first_step + 1, first_step + 2]
    assert body["steps"]["e1"]["prefill_tokens"][:4] == [8, 8, 4, 0]
    assert body["window"] == 2
    planned, results = body["steps"]["e1"]["planned_us"], body["steps"]["e1"]["result_us"]
    assert all(a < b for a, b in zip(planned, results, strict=True))
    assert json.loads(json.dumps(body)) == body
    assert status.trace(world.scheduler.state, "b", 0) == {"request_id": "b", "state": "unknown"}


def test_an_answer_fits_any_server() -> None:
    world, wall_us = World(), 1_700_000_000_000_000  # numbers as long as they really are
    world.add_engine()
    arrival_us = world.now_us + 10
    world.ask("a", [5, 6], 2, received_wall_us=wall_us, sent_wall_us=wall_us)
    world.run()
    long = dataclasses.replace(
        record(0, arrival_us + 5), executor="e1", start_wall_us=wall_us, end_wall_us=wall_us + 5_000,
        forward_us=4_000, sample_us=1_000, wait_us=4_000, rows=256, tokens=8_192, prefill_tokens=8_192,
        segments=(3, 123_456, 54_321) * 32,
    )  # fmt: skip
    for step in range(100_000, 100_000 + MAX_KEPT):
        world.scheduler.state.step_log.ring.append(dataclasses.replace(long, step=step))
    body = status.trace(world.scheduler.state, "a", wall_us - arrival_us, steps=True)
    assert body["steps"]["e1"]["step"] == [*range(100_000 + MAX_KEPT - status.MAX_STEPS, 100_000 + MAX_KEPT)]
    assert len(json.dumps(body)) < 512 * 1024
    assert [bool(pieces) for pieces in body["steps"]["e1"]["segments"]] == [
        *[False] * (status.MAX_STEPS - status.MAX_SPLIT), *[True] * status.MAX_SPLIT
    ]  # fmt: skip


def test_many_chunks_end_in_one() -> None:
    world = World()
    world.add_engine(max_step_tokens=1, block_tokens=1, blocks=64)
    world.ask("a", list(range(10, 10 + MAX_CHUNKS + 8)), 1)
    world.run()
    (reader,) = world.readers_of("a")
    assert reader.closed is not None
    chunks = reader.closed.chunks
    assert [c.tokens for c in chunks] == [1] * (MAX_CHUNKS - 1) + [9]
    assert chunks[-1].at_us + chunks[-1].took_us == reader.closed.timings.live_us


def test_a_chunk_on_a_lost_executor_ended_when_it_was_lost() -> None:
    world = World()
    world.add_engine("e1")
    world.ask("a", [5, 6, 7], 2)
    world.crash("e1")
    world.tick(500)
    world.add_engine("e2")
    world.run()
    (reader,) = world.readers_of("a")
    assert reader.closed is not None
    lost, again = reader.closed.chunks
    assert (lost.executor, again.executor, reader.closed.executor) == ("e1", "e2", "e2")
    requeued = next(d for d in reader.closed.decisions if d.what == "requeue")
    assert lost.at_us + lost.took_us == requeued.at_us
    assert again.at_us > requeued.at_us + 500
