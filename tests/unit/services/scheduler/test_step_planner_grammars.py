"""A row waits for its own grammar, no step does, and no other row."""

from __future__ import annotations

import hashlib

import pytest
from support.scheduler.world import World

from services.scheduler.state.requests import Arrived, Sequence
from services.scheduler.state.state import GRAMMARS, Limits
from shared.messages import GrammarFailed, GrammarReady

PROMPT = list(range(10, 19))  # two blocks, and the token from which the first one of the answer is sampled
MODES = ("single", "run_ahead", "two_batch")


@pytest.fixture(params=MODES)
def world(request: pytest.FixtureRequest) -> World:
    world = World(Limits(overlap=request.param))
    world.add_engine(reports_grammars=True)
    return world


def slots_of(world: World, request: str) -> list[Sequence]:
    running = world.scheduler.state.executors["e1"].running
    return [s for s in running if s.request.tokenized.request == request]


def ready(world: World, sequence: Sequence, generation: int = 0) -> None:
    number = generation or sequence.generation
    news = GrammarReady(slot=sequence.slot, generation=number, compile_us=1)
    world.handle(Arrived("executor.e1", news))


def test_others_are_answered_while_a_grammar_is_compiled(world: World) -> None:
    world.ask("structured", PROMPT, 3, grammar="g")
    world.ask("free", PROMPT, 5)
    world.run()
    world.assert_answers("free")
    (waiting,) = slots_of(world, "structured")
    assert (waiting.computed, waiting.generated) == (len(PROMPT) - 1, 0)
    steps = len(world.plans)
    world.ask("later", [1, 2, 3], 2)
    world.run()
    world.assert_answers("later")
    assert all(waiting.slot not in plan.slots for plan in world.plans[steps:])
    ready(world, waiting, generation=waiting.generation - 1 or 99)  # of an earlier use of the slot
    world.run()
    assert waiting.generated == 0
    ready(world, waiting)
    world.run()
    world.assert_answers("structured")
    world.assert_idle()


def test_one_that_is_there_in_time_costs_no_step(world: World) -> None:
    world.ask("structured", list(range(100, 160)), 2, grammar="g")
    (waiting,) = slots_of(world, "structured")
    assert waiting.compiles_grammar
    ready(world, waiting)
    world.run()
    world.assert_answers("structured")


def test_one_that_was_compiled_before_is_not_awaited(world: World) -> None:
    world.ask("first", PROMPT, 2, grammar="g")
    ready(world, *slots_of(world, "first"))
    world.run()
    steps = len(world.plans)
    world.ask("second", [*PROMPT, 7], 2, grammar="g")
    assert not slots_of(world, "second")[0].compiles_grammar
    world.run()
    world.assert_answers("second")
    assert list(world.plans[steps].counts) == [2]  # all after the hit of two blocks, not all but the last
    for i in range(GRAMMARS):
        world.ask(f"other {i}", PROMPT, 1, grammar=f"other {i}")
        assert slots_of(world, f"other {i}")[0].compiles_grammar
        ready(world, *slots_of(world, f"other {i}"))
        world.run()
    world.ask("late", PROMPT, 2, grammar="g")
    assert slots_of(world, "late")[0].compiles_grammar


def test_compiled_grammars_have_the_same_numbers_in_each_process(world: World) -> None:
    """Event logs hold the state: Python's own hash of a text differs from process to process."""
    world.ask("first", PROMPT, 2, grammar="g")
    ready(world, *slots_of(world, "first"))
    number = int.from_bytes(hashlib.blake2b(b"g", digest_size=7).digest())
    assert world.scheduler.state.executors["e1"].grammars == {number: True}


def test_grammar_of_a_failed_engine_is_awaited(world: World) -> None:
    world.ask("first", PROMPT, 2, grammar="g")
    (first,) = slots_of(world, "first")
    news = GrammarReady(slot=first.slot, generation=first.generation, compile_us=0)
    world.handle(Arrived("executor.e1", news))
    world.run()
    world.assert_answers("first")
    world.ask("second", PROMPT, 2, grammar="g")
    assert slots_of(world, "second")[0].compiles_grammar


def test_one_that_failed_before_is_awaited(world: World) -> None:
    world.ask("first", PROMPT, 2, grammar="g")
    (first,) = slots_of(world, "first")
    failed = GrammarFailed(slot=first.slot, generation=first.generation, message="unbalanced")
    world.handle(Arrived("executor.e1", failed))
    world.run()
    world.ask("second", PROMPT, 2, grammar="g")
    assert slots_of(world, "second")[0].compiles_grammar


def test_one_that_fails_ends_its_request_alone(world: World) -> None:
    world.ask("structured", PROMPT, 3, grammar="g", n=2)
    world.ask("free", PROMPT, 5)
    _, follower = slots_of(world, "structured")
    news = GrammarFailed(slot=follower.slot, generation=follower.generation, message="unbalanced")
    world.handle(Arrived("executor.e1", news))
    world.handle(Arrived("executor.e1", news))
    world.run()
    world.assert_answers("free")
    for reader in world.readers_of("structured"):
        assert reader.closed is not None
        assert (reader.closed.code, reader.closed.message) == (400, "unbalanced")
    world.assert_idle()


def test_choices_wait_with_the_first_of_them(world: World) -> None:
    world.ask("structured", PROMPT, 3, grammar="g", n=3)
    world.run()
    assert all(s.generated == 0 for s in slots_of(world, "structured"))
    for sequence in slots_of(world, "structured"):
        ready(world, sequence)
    world.run()
    world.assert_answers("structured")
    world.assert_idle()


def test_grammar_is_compiled_again_on_another_executor(world: World) -> None:
    world.ask("structured", PROMPT, 3, grammar="g")
    world.run()
    (waiting,) = slots_of(world, "structured")
    ready(world, waiting)
    world.crash("e1")
    world.add_engine(epoch=2, reports_grammars=True)
    world.run()
    (again,) = slots_of(world, "structured")
    assert again.compiles_grammar
    ready(world, again)
    world.run()
    world.assert_answers("structured")
    world.assert_idle()


def test_a_cancel_and_a_time_limit_wait_for_no_grammar(world: World) -> None:
    world.ask("structured", PROMPT, 3, grammar="g", timeout_us=1_000_000)
    world.run()
    world.tick(2_000_000)
    (reader,) = world.readers_of("structured")
    assert reader.closed is not None
    world.run()
    world.assert_idle()


def test_rows_are_planned_at_once_on_an_executor_without_grammar_reports() -> None:
    world = World()
    world.add_engine()
    world.ask("structured", PROMPT, 3, grammar="g")
    world.run()
    world.assert_answers("structured")
