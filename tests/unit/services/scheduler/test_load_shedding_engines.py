"""The door asks the engines, by their hello, what they cannot be asked for."""

from __future__ import annotations

import dataclasses

import pytest
from support.scheduler.world import World

from services.scheduler.state.requests import Arrived
from shared.messages import Sampling, floats, ints

BIAS = {"sampling": Sampling(bias_ids=ints([1000]), bias_values=floats([1.0]))}


@pytest.mark.parametrize(
    ("prompt", "more", "why"),
    [
        ([5, 1000], {}, "`prompt`: the weights of 'm' have 1000 tokens, and no token 1000"),
        ([5], BIAS, "`logit_bias`: the weights of 'm' have 1000 tokens, and no token 1000"),
    ],
)
def test_a_token_that_the_weights_lack_is_refused(
    prompt: list[int], more: dict[str, object], why: str
) -> None:
    world = World()
    world.add_engine()
    world.ask("r", prompt, 4, **more)
    assert [(r.code, r.message.startswith(why)) for r in world.rejected] == [(400, True)]
    world.ask("the last there is", [999], 4)
    world.run()
    world.assert_answers("the last there is")


@pytest.mark.parametrize(("most", "refused"), [((0,), False), ((3,), False), ((2,), True), ((2, 4), False)])
def test_stop_ids_are_bounded_by_the_engines_room(most: tuple[int, ...], refused: bool) -> None:
    world = World()
    for i, each in enumerate(most):
        world.add_engine(f"e{i}", max_stop_ids=each)
    world.ask("r", [5], 4)
    asked = dataclasses.replace(world.asked["r"], request="stops", inbox="inbox.2", stop_ids=ints([1, 2, 3]))
    world.handle(Arrived("tokenizer.t1", asked))
    wanted = ["`stop_token_ids`: 3 with the model's own are over the 2 of the engine: ask for fewer"]
    assert [rejected.message for rejected in world.rejected] == wanted * refused
