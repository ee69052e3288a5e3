"""A choice whose logits processor fails takes its request with it: the client has its error by then."""

from __future__ import annotations

import dataclasses

from support.scheduler.world import World

from shared.messages import ints


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
