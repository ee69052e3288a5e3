"""A choice that fails takes its request with it, since the client has its error by then; and nothing else."""

from __future__ import annotations

import dataclasses

import pytest
from support.scheduler.world import World

from shared.messages import ROW_REFUSED, ints


def test_the_other_choices_of_a_request_end_with_the_one_that_failed() -> None:
    world = World()
    world.add_engine()
    world.ask("r", [5, 6, 7], 20, n=3)
    world.ask("other", [8, 9], 4)
    world.deliver()
    for result in list(world.results["e1"]):
        slots = list(world.plans[result.step - 1].sample_slots)
        (sequences,) = [r.sequences for r in world.scheduler.state.requests.values() if len(r.sequences) == 3]
        failed = [i for i, slot in enumerate(slots) if slot == sequences[1].slot]
        if not failed:
            world.deliver()
            continue
        ids, done = list(result.ids), list(result.done)
        ids[failed[0]], done[failed[0]] = -1, 2
        world.results["e1"][0] = dataclasses.replace(
            result, ids=ints(ids), done=ints(done), row_errors=((failed[0], "logits processor x: no"),)
        )
        world.deliver()
        break
    closes = [reader.closed for reader in world.readers_of("r")]
    assert [(close.reason, close.code) for close in closes if close is not None] == [("error", 500)] * 3
    assert closes[0] is not None
    assert closes[0].message == "executor.e1: logits processor x: no"
    world.run()
    world.assert_answers("other")
    world.assert_idle()


@pytest.mark.parametrize(("why", "code", "cached"), [("NaN", 500, 0), (f"{ROW_REFUSED}mild", 400, 12)])
def test_no_sequence_starts_from_blocks_of_a_failed_sequence(why: str, code: int, cached: int) -> None:
    world = World()
    world.add_engine()
    prompt = list(range(5, 18))
    world.ask("bystander", [1, 2, 3], 6)
    world.ask("r", prompt, 4)
    world.deliver()
    while world.results["e1"]:
        (bad,) = [
            r.sequences[0] for r in world.scheduler.state.requests.values() if r.tokenized.request == "r"
        ]
        result = world.results["e1"][0]
        slots = list(world.plans[result.step - 1].sample_slots)
        if bad.slot in slots:
            row = slots.index(bad.slot)
            ids, done = list(result.ids), list(result.done)
            ids[row], done[row] = -1, 2
            world.results["e1"][0] = dataclasses.replace(
                result, ids=ints(ids), done=ints(done), row_errors=((row, why),)
            )
            world.deliver()
            break
        world.deliver()
    (reader,) = world.readers_of("r")
    assert reader.closed is not None
    assert reader.closed.code == code
    world.run()
    world.assert_answers("bystander")
    world.ask("again", prompt, 4)
    world.run()
    world.assert_answers("again")
    (reader,) = world.readers_of("again")
    assert reader.closed is not None
    assert reader.closed.usage.cached_tokens == cached
    world.assert_idle()
