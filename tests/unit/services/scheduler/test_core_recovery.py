"""A scheduler goes on with requests of one that has died: their tokens are those of prompt and seed."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.executor.paged_engine import STOP_ID, expected_tokens
from support.scheduler.world import World, any_limits

from services.scheduler.state.requests import (
    Arrived,
    DrainRequested,
    PeerDraining,
    PeerLost,
    PeerReady,
    Send,
    request_facts,
)
from shared.kv_blocks import choice_seed
from shared.messages import MOVED, Cancel, Detached, Tokenized, ints

PROMPT = [*range(5, 14)]


def asked(**more: object) -> Tokenized:
    fields: dict[str, object] = {
        "request": "r", "attempt": 3, "tenant": "public", "model": "m", "inbox": "inbox.r",
        "timeout_us": 10**9, "max_tokens": 12, "tokens": ints(PROMPT), "seed": 5,
    }  # fmt: skip
    return Tokenized(**{**fields, **more})  # type: ignore[arg-type]  # test shorthand


def wanted(of: Tokenized) -> list[list[int]]:
    """What each choice must generate."""
    stops = STOP_ID in of.stop_ids
    seeds = [choice_seed(of.seed, choice) for choice in range(of.n)]
    return [expected_tokens(list(of.tokens), seed, of.max_tokens, stops) for seed in seeds]


def so_far(of: Tokenized, counts: list[int], reasons: list[str] | None = None, **more: object) -> Tokenized:
    """The same request, of whose choices so many tokens are known."""
    tokens = of.tokens[:]
    for want, count in zip(wanted(of), counts, strict=True):
        tokens += ints(want[:count])
    reasons = reasons or [""] * of.n
    return dataclasses.replace(
        of,
        tokens=tokens,
        generated=ints(counts),
        reasons=tuple(reasons),
        **more,  # type: ignore[arg-type]
    )


def resume(world: World, of: Tokenized, again: Tokenized, source: str = "detokenizer.d1") -> None:
    world.asked[of.request] = of
    world.handle(Arrived(source, again))


def world_with_engine(**facts: int) -> World:
    world = World()
    world.add_engine(**facts)
    return world


@pytest.mark.parametrize("count", range(13))
def test_reopened_request_goes_on_after_any_token(count: int) -> None:
    world, of = world_with_engine(), asked()
    resume(world, of, so_far(of, [count]))
    world.run()
    (reader,) = world.readers_of("r")
    assert (reader.opened.attempt, len(reader.opened.tokens)) == (3, count)
    world.assert_answers("r")
    world.assert_idle()
    assert world.accepted == ["r"]


@given(st.data())
def test_any_choices_under_any_settings_beside_others(data: st.DataObject) -> None:
    world = World(any_limits(data))
    world.add_engine(blocks=data.draw(st.integers(16, 40)))
    for other in range(data.draw(st.integers(0, 2))):
        world.ask(f"o{other}", [3] * 7, 6, seed=other)
        world.deliver()
    n = data.draw(st.integers(1, 3))
    stop_ids = ints([STOP_ID] if data.draw(st.booleans()) else [])
    of = asked(n=n, max_tokens=data.draw(st.integers(1, 9)), stop_ids=stop_ids)
    counts = [data.draw(st.integers(0, len(want))) for want in wanted(of)]
    resume(world, of, so_far(of, counts))
    world.run()
    world.assert_answers("r")
    world.assert_idle()


def test_stream_goes_only_to_the_detokenizer_that_requests_it() -> None:
    world, of = World(shards=("d1", "d2", "d3")), asked()
    world.add_engine()
    for name in ("d1", "d2", "d3"):
        one = dataclasses.replace(of, request=f"r-{name}")
        resume(world, one, so_far(one, [2]), f"detokenizer.{name}")
        assert world.scheduler.state.requests["public", f"r-{name}"].shard == name
    world.run()


def test_log_probabilities_that_only_a_lost_detokenizer_had_fail_the_request() -> None:
    """One choice has ended, and its detokenizer has not answered yet."""
    world, of = World(shards=("d1", "d2")), asked(n=2, logprobs=1)
    world.add_engine()
    resume(world, of, so_far(of, [2, 2]))
    other = dataclasses.replace(of, request="fresh", seed=6)
    resume(world, other, so_far(other, [0, 0]))
    world.auto_end = False
    resume(
        world, ended := dataclasses.replace(of, request="ended"), so_far(ended, [2, 12], ["stop", "length"])
    )
    world.handle(PeerLost("detokenizer", "d1"))
    for name in ("r", "ended"):
        assert {r.closed and (r.closed.reason, r.closed.code) for r in world.readers_of(name)} == {
            ("error", 503)
        }
    world.auto_end = True
    world.run()
    world.assert_answers("fresh")


def test_choices_that_had_ended_are_closed_as_they_were() -> None:
    world, of = world_with_engine(), asked(n=3)
    world.auto_end = False
    resume(world, of, so_far(of, [4, 2, 12], ["stop", "", ""]))
    closes = {r.opened.choice: r.closed for r in world.readers_of("r")}
    assert (closes[0] and (closes[0].final, closes[0].reason)) == (4, "stop")
    assert (closes[2] and (closes[2].final, closes[2].reason)) == (12, "length")
    assert closes[1] is None
    world.auto_end = True
    world.run()
    tokens = [r.tokens for r in world.readers_of("r")]
    assert [len(t) for t in tokens] == [4, 12, 12]
    assert tokens[1] == wanted(of)[1]


def test_stop_token_whose_close_was_lost_ends_the_reopened_request() -> None:
    of = next(
        one
        for seed in range(1_000)
        if 1 < len(wanted(one := asked(seed=seed, stop_ids=ints([STOP_ID])))[0]) < 12
    )
    world = world_with_engine()
    resume(world, of, so_far(of, [len(wanted(of)[0])]))
    world.assert_answers("r")
    world.assert_idle()
    assert not world.plans


def test_choices_without_a_token_share_their_prompt_as_at_first() -> None:
    world, of = world_with_engine(), asked(n=3)
    resume(world, of, so_far(of, [0, 0, 0]))
    world.run()
    world.assert_answers("r")
    assert sum(sum(plan.counts) for plan in world.plans) < 2 * len(PROMPT) + 3 * 12


def test_request_reopened_twice_is_opened_again_and_computed_once() -> None:
    world, of = world_with_engine(), asked()
    again = so_far(of, [2])
    resume(world, of, again)
    first = {r.opened.seq for r in world.readers_of("r")}
    world.readers.clear()
    resume(world, of, again)
    assert {r.opened.seq for r in world.readers_of("r")} == first
    assert world.accepted == ["r", "r"]
    assert len(world.scheduler.state.requests) == 1


def test_detokenizer_gets_moved_for_a_request_that_its_tokenizer_submitted_first() -> None:
    world = World(shards=("d1", "d2"))
    world.add_engine()
    of = asked()
    world.handle(Arrived("tokenizer.t1", of))
    shard = world.scheduler.state.requests["public", "r"].shard
    other = "d2" if shard == "d1" else "d1"
    resume(world, of, so_far(of, [2]), f"detokenizer.{other}")
    assert [(r.code, r.attempt) for r in world.rejected] == [(MOVED, 3)]
    world.run()
    world.assert_answers("r")


@pytest.mark.parametrize("why", ["no executor", "draining", "unknown detokenizer", "executor drains"])
def test_scheduler_that_cannot_serve_yet_answers_503_and_serves_later(why: str) -> None:
    world, of = World(), asked()
    if why != "no executor":
        world.add_engine()
    if why == "draining":
        world.handle(DrainRequested())
    if why == "executor drains":
        world.handle(PeerDraining("executor", "e1"))
    resume(world, of, so_far(of, [2]), "detokenizer.d9" if why == "unknown detokenizer" else "detokenizer.d1")
    assert [r.code for r in world.rejected] == [503]
    assert not world.scheduler.state.requests
    if why == "draining":
        return
    world.add_engine("e2")
    resume(world, of, so_far(of, [2]))
    world.run()
    world.assert_answers("r")


def test_reopened_request_passes_the_queues_limits() -> None:
    """It was accepted once: neither a full queue nor a late start refuses it now."""
    world = World(dataclasses.replace(World().limits, max_waiting=1))
    world.add_engine(slots=1)
    for i in range(3):
        world.ask(f"o{i}", PROMPT, 4)
    assert [r.code for r in world.rejected] == [429]
    of = asked(slo_class="interactive")
    resume(world, of, so_far(of, [2]))
    world.run()
    world.assert_answers("r")
    assert [r.code for r in world.rejected] == [429]


def test_request_that_can_never_be_served_here_is_refused_for_good() -> None:
    world = world_with_engine(max_context=20)
    of = asked()
    resume(world, of, so_far(of, [2]))
    broken = dataclasses.replace(asked(request="b"), generated=ints([50]), reasons=("",))
    resume(world, of, broken)
    assert [r.code for r in world.rejected] == [400, 400]


def test_a_cancel_that_came_first_is_kept_for_it() -> None:
    world, of = world_with_engine(), asked()
    world.handle(Arrived("client", Cancel(tenant="public", request="r")))
    resume(world, of, so_far(of, [2], age_us=1_000_000))
    assert [r.code for r in world.rejected] == [499]


def test_time_limit_and_stages_of_a_reopened_request_count_from_the_first_arrival() -> None:
    world, of = world_with_engine(), asked(timeout_us=5_000_000)
    world.now_us = 60_000_000
    resume(world, of, so_far(of, [2], age_us=4_000_000, first_us=300_000))
    request = world.scheduler.state.requests["public", "r"]
    (sequence,) = request.sequences
    facts = request_facts(request, world.now_us)
    assert facts.choices[0].close.timings.queue_us == 0
    assert facts.choices[0].close.timings.prefill_us == 300_000
    assert [d.what for d in sequence.decisions][:1] == ["resume"]
    world.tick(1_000_001)
    (reader,) = world.readers_of("r")
    assert reader.closed is not None
    assert (reader.closed.reason, reader.closed.code) == ("error", 408)


def test_recomputed_tokens_of_a_reopened_request_are_counted_as_recomputed() -> None:
    world, of = world_with_engine(), asked()
    resume(world, of, so_far(of, [5]))
    world.run()
    assert world.scheduler.state.counters.recomputed_tokens == len(PROMPT) + 5 - 1
    assert world.scheduler.state.counters.generated_tokens == 12 - 5


def test_request_as_submitted_is_left_with_every_detokenizer() -> None:
    """With the one of its Opens, and with the next one that takes over."""
    world = World(shards=("d1", "d2"))
    world.add_engine()
    kept: list[tuple[str, Tokenized]] = []
    carry = world._carry_out

    def watch(command: Send) -> None:
        if isinstance(command.message, Tokenized):
            kept.append((command.to, command.message))
        carry(command)

    world._carry_out = watch  # type: ignore[method-assign]
    of = asked()
    world.handle(Arrived("tokenizer.t1", of))
    shard = world.scheduler.state.requests["public", "r"].shard
    world.handle(PeerLost("detokenizer", shard))
    other = "d2" if shard == "d1" else "d1"
    own, copy, again = kept
    assert [to for to, _ in (own, again)] == [f"detokenizer.{shard}", f"detokenizer.{other}"]
    assert [dataclasses.replace(message, age_us=0) for _, message in (own, again)] == [of, of]
    assert copy == (f"detokenizer.{other}", dataclasses.replace(of, shard=shard)), "should both die"
    world.handle(PeerReady("detokenizer", shard, 9))
    to, later = kept[-1]
    assert to == f"detokenizer.{shard}"
    expected = dataclasses.replace(of, shard=other, attempt=of.attempt + 1)
    assert dataclasses.replace(later, age_us=0) == expected
    assert later.attempt > copy[1].attempt


def test_reopened_request_has_its_age() -> None:
    world, of = World(shards=("d1", "d2")), asked()
    world.add_engine()
    world.handle(Arrived("tokenizer.t1", of))
    assert world.deliver()
    shard = world.scheduler.state.requests["public", "r"].shard
    began_us = world.scheduler.state.requests["public", "r"].arrival_us
    world.now_us = began_us + 40_000_000
    commands = world.scheduler.handle(PeerLost("detokenizer", shard), world.now_us)
    (message,) = (c.message for c in commands if isinstance(c.message, Tokenized))
    assert message.age_us == 40_000_000
    assert 0 < message.first_us < 1_000
    assert dataclasses.replace(message, age_us=0, first_us=0) == of


def test_reopened_request_goes_on_from_the_attempt_that_its_client_has_seen_last() -> None:
    """Two detokenizers ask: one had been stopped, and its request moved to the other."""
    world = World(shards=("d1", "d2"))
    world.add_engine()
    of = asked(attempt=1)
    resume(world, of, so_far(of, [2]), "detokenizer.d1")
    resume(world, of, so_far(of, [4], attempt=2), "detokenizer.d2")
    request = world.scheduler.state.requests["public", "r"]
    assert (request.shard, request.attempt, world.rejected) == ("d2", 2, [])
    assert world.moved == [("detokenizer.d1", request.sequences[0].seq)]
    world.run()
    world.assert_idle()
    assert world.accepted == ["r", "r"]


def test_a_detokenizer_that_drains_may_finish_what_it_has() -> None:
    world, of = world_with_engine(), asked()
    world.handle(PeerDraining("detokenizer", "d1"))
    resume(world, of, so_far(of, [2]))
    world.run()
    world.assert_answers("r")
    world.handle(PeerLost("detokenizer", "d1"))
    resume(world, asked(request="q"), so_far(asked(request="q"), [2]))
    assert [r.code for r in world.rejected] == [503]


def test_a_cancel_of_an_earlier_request_with_this_id_is_not_meant() -> None:
    world, of = world_with_engine(), asked()
    world.handle(Arrived("client", Cancel(tenant="public", request="r")))
    world.now_us += 10_000_000
    resume(world, of, so_far(of, [2], age_us=5_000_000))
    world.run()
    world.assert_answers("r")


def test_request_that_goes_on_elsewhere_is_not_computed_here() -> None:
    world, of = world_with_engine(), asked(finish_detached=True)
    world.handle(Arrived("tokenizer.t1", of))
    (sequence,) = world.scheduler.state.requests["public", "r"].sequences
    world.handle(Arrived("detokenizer.d1", Detached(seqs=ints([sequence.seq]))))
    assert sequence.is_live
    world.handle(Arrived("detokenizer.d1", Detached(seqs=ints([sequence.seq]), moved=True)))
    assert not sequence.is_live
    world.run()
    world.assert_idle()


def test_request_that_had_gone_elsewhere_may_come_back() -> None:
    """The next scheduler died, too, before the word that closes it here."""
    world, of = world_with_engine(), asked()
    world.auto_end = False
    world.handle(Arrived("tokenizer.t1", of))
    (sequence,) = world.scheduler.state.requests["public", "r"].sequences
    world.handle(Arrived("detokenizer.d1", Detached(seqs=ints([sequence.seq]), moved=True)))
    world.readers.clear()
    world.auto_end = True
    resume(world, of, so_far(of, [2]))
    world.run()
    world.assert_answers("r")
    world.assert_idle()


def test_request_without_a_reader_is_opened_again_like_any_other_when_messages_were_lost() -> None:
    """Or its detokenizer would ask for it for ever."""
    world, of = world_with_engine(), asked(finish_detached=True)
    world.handle(Arrived("tokenizer.t1", of))
    request = world.scheduler.state.requests["public", "r"]
    world.handle(Arrived("detokenizer.d1", Detached(seqs=ints([request.sequences[0].seq]))))
    assert request.detached
    before = request.attempt
    world.handle(Arrived("detokenizer.d1", Detached(seqs=ints())))
    assert request.attempt == before + 1
    world.run()
    world.assert_idle()
