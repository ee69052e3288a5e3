"""The wire as a whole: five fake actors over MemoryBus through every flow that WIRE.md names."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from support.wire.fake_executor import FakeExecutor
from support.wire.fakes import FakeDetokenizer, expected_ids, text_of
from support.wire.house import House

PROMPT = [11, 12, 13, 14, 15, 16]


@pytest.fixture
async def house() -> AsyncIterator[House]:
    house = House()
    await house.start()
    yield house
    await house.stop()
    assert not house.executor.slots
    assert not any(house.scheduler.steps.tables.owners.values())
    assert house.tokenizer.inboxes == {}
    assert house.detokenizer.open == {}


def ids_of(house: House, seq: int = 1) -> list[int]:
    return house.scheduler.sequences[seq].generated


def final_of(house: House, seq: int = 1) -> tuple[str, int, str]:
    sequence = house.scheduler.sequences[seq]
    return sequence.state, sequence.final, sequence.reason


async def test_request_sends_these_messages(house: House) -> None:
    frames = await house.ask(PROMPT, max_tokens=2)
    assert house.transcript == [
        "T>S Tokenized",
        "S>T Accepted",
        "S>D Open",
        "S>E SlotOpen",
        "S>E StepPlan",
        "E>S StepResult",
        "S>D Tokens",
        "S>E StepPlan",
        "E>S StepResult",
        "S>D Tokens",
        "S>E SlotClose",
        "S>D Close",
        "D>S Ended",
    ]
    ids = expected_ids(PROMPT, 7, 0, 2)
    assert ids_of(house) == ids
    assert frames.of(0) == [
        {"accepted": True},
        {"first": 0, "text": text_of(ids[:1])},
        {"first": 1, "text": text_of(ids[1:])},
        {"done": 2, "reason": "length", "code": 0},
    ]
    usage = house.scheduler.sequences[1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (6, 2)


async def test_two_choices_share_the_prompt_and_part_at_its_tail_block(house: House) -> None:
    frames = await house.ask(PROMPT, n=2, max_tokens=3)
    one, two = expected_ids(PROMPT, 7, 0, 3), expected_ids(PROMPT, 7, 1, 3)
    assert one != two
    assert (ids_of(house, 1), ids_of(house, 2)) == (one, two)
    assert (frames.text(0), frames.text(1)) == (text_of(one), text_of(two))
    assert [final_of(house, seq) for seq in (1, 2)] == [("ended", 3, "length")] * 2
    # Six prompt tokens are two blocks of 4; the second is written by both, so one of them gets a copy.
    assert set(house.executor.blocks) == {10, 11, 12}
    assert house.executor.blocks[10] == PROMPT[:4]
    assert sorted(tuple(house.executor.blocks[b]) for b in (11, 12)) == sorted(
        (15, 16, *ids[:2]) for ids in (one, two)
    )
    assert house.transcript.count("S>E StepPlan") == house.transcript.count("S>D Tokens") == 3
    assert house.transcript[2:6] == ["S>D Open", "S>E SlotOpen"] * 2


def stop_string(start: int, length: int, of: int = 8) -> tuple[str, int]:
    """Letters of tokens [start, start + length) of the answer, and the index where they first end."""
    text = text_of(expected_ids(PROMPT, 7, 0, of))
    stop = text[start : start + length]
    return stop, text.find(stop) + length


async def test_a_stop_string_across_tokens_ends_the_sequence(house: House) -> None:
    stop, index = stop_string(1, 3)
    house.broker.delay("hr.f.scheduler.s0.in.StopFound", by=4)
    frames = await house.ask(PROMPT, max_tokens=8, stop=(stop,))
    assert index < len(ids_of(house)) < 8, "steps ran on while StopFound was on its way, not to the end"
    assert final_of(house) == ("ended", index, "stop")
    assert frames.of(0)[-1] == {"done": index, "reason": "stop", "code": 0}
    assert frames.text(0) == text_of(expected_ids(PROMPT, 7, 0, index))


async def test_a_stop_string_races_with_the_end_by_length(house: House) -> None:
    """The scheduler has closed by length when StopFound arrives: the earliest index wins, and Ended,
    which has the true reason, comes last."""
    stop, index = stop_string(2, 2)
    house.broker.delay("hr.f.scheduler.s0.in.StopFound", by=10_000)
    frames = await house.ask(PROMPT, max_tokens=8, stop=(stop,))
    late = house.transcript
    assert late.index("S>D Close") < late.index("D>S StopFound")
    assert len(ids_of(house)) == 8
    assert final_of(house) == ("ended", index, "stop")
    usage = house.scheduler.sequences[1].usage
    assert usage is not None
    assert usage.completion_tokens == index
    assert frames.of(0)[-1] == {"done": index, "reason": "stop", "code": 0}
    assert frames.text(0) == text_of(ids_of(house)[:index])


async def test_lost_message_is_requested_and_the_order_is_kept(house: House) -> None:
    house.broker.drop("hr.f.detokenizer.d0.in.Tokens")
    frames = await house.ask(PROMPT, max_tokens=3)
    assert house.between("D") == [
        "S>D Open",
        "S>D Tokens",  # the second step's, number 3 of the stream: 2 is missing
        "D>S Resend 2",
        "S>D Tokens again",
        "S>D Tokens again",
        "S>D Tokens",
        "S>D Close",
        "D>S Ended",
    ]
    assert frames.text(0) == text_of(expected_ids(PROMPT, 7, 0, 3))
    assert [f.get("first") for f in frames.of(0)[1:-1]] == [0, 1, 2]


async def test_a_duplicate_is_applied_once(house: House) -> None:
    for pattern in ("hr.f.detokenizer.d0.in.*", "hr.f.executor.e0.in.*", "hr.f.scheduler.s0.in.*"):
        house.broker.duplicate(pattern, times=100)
    frames = await house.ask(PROMPT, max_tokens=3)
    assert frames.text(0) == text_of(expected_ids(PROMPT, 7, 0, 3))
    assert len(frames.of(0)) == 5
    assert house.executor.last_step == 3


async def test_a_lost_tail_shows_once_the_stream_is_silent(house: House) -> None:
    house.broker.drop("hr.f.executor.e0.in.StepPlan")
    await house.ask(PROMPT, max_tokens=1)
    assert house.transcript == ["T>S Tokenized", "S>T Accepted", "S>D Open", "S>E SlotOpen"]
    house.transcript.clear()
    await house.tick()
    assert "S>E StreamAt 3" in house.transcript
    assert house.between("E") == [
        "E>S Resend 3",
        "S>E StepPlan again",
        "E>S StepResult",
        "S>E SlotClose",
    ]
    assert final_of(house) == ("ended", 1, "length")


async def test_lost_announcement_of_a_lost_tail_is_repeated(house: House) -> None:
    house.broker.drop("hr.f.executor.e0.in.StepPlan")
    house.broker.drop("hr.f.executor.e0.in.StreamAt")
    await house.ask(PROMPT, max_tokens=1)
    await house.tick()
    assert ids_of(house) == []
    await house.tick()
    assert final_of(house) == ("ended", 1, "length")


async def test_a_plan_that_is_gone_resets_the_executor_and_the_same_ids_go_on(house: House) -> None:
    await house.ask([1, 2], "warm", max_tokens=1)
    first_epoch = house.executor.exec_epoch
    house.transcript.clear()
    house.broker.drop("hr.f.executor.e0.in.StepPlan")
    await house.ask(PROMPT, max_tokens=3)
    house.runtimes["scheduler.s0"].mailbox.forget("executor.e0")
    await house.tick()
    assert house.between("E")[:7] == [
        "S>E SlotOpen",
        "E>S Resend 6",
        "S>E StreamReset 7",
        "E>S ExecHello",
        "S>E ExecWelcome",
        "S>E SlotOpen",
        "S>E StepPlan",
    ]
    assert house.executor.exec_epoch == first_epoch + 1
    assert ids_of(house, 2) == expected_ids(PROMPT, 7, 0, 3)


async def test_lost_results_reset_the_executor_too(house: House) -> None:
    house.broker.drop("hr.f.scheduler.s0.in.StepResult")
    await house.ask(PROMPT, max_tokens=3)
    house.runtimes["executor.e0"].mailbox.forget("scheduler.s0")
    await house.tick()
    assert "S>E ExecReset" in house.transcript
    assert ids_of(house) == expected_ids(PROMPT, 7, 0, 3)


PAUSE = [
    "S>K KvReserve",
    "K>S KvReserved",
    "S>E KvCopy",
    "E>S KvCopied",
    "S>K KvCommit",
    "K>S KvStored",
    "S>E SlotClose",
]
RESTORE = [
    "S>K KvPrefetch",
    "K>S KvReady",
    "S>E KvCopy",
    "S>E SlotOpen",
    "S>E StepPlan",
    "E>S KvCopied",
]


async def test_pause_and_restore_from_the_arena(house: House) -> None:
    house.scheduler.pause_after[1] = 3
    frames = await house.ask(PROMPT, max_tokens=6)
    sequence = house.scheduler.sequences[1]
    assert house.transcript[-8:] == ["S>D Tokens", *PAUSE]
    assert (sequence.state, sequence.computed, sequence.table) == ("paused", 8, [])
    ids = expected_ids(PROMPT, 7, 0, 6)
    assert house.arena == {(1, 0): PROMPT[:4], (1, 4): [*PROMPT[4:], *ids[:2]]}
    house.executor.blocks.clear()
    house.transcript.clear()

    house.scheduler.tiers.restore(sequence)
    await house.broker.settle()
    assert house.transcript[:6] == RESTORE
    restored = house.executor.last_step
    assert restored == 6
    assert ids_of(house) == ids
    assert frames.text(0) == text_of(ids)
    assert final_of(house) == ("ended", 6, "length")
    assert house.kv.leases == set()


async def test_a_partial_tail_block_is_paused_and_restored_as_well(house: House) -> None:
    house.scheduler.pause_after[1] = 2
    await house.ask(PROMPT, max_tokens=4)
    sequence = house.scheduler.sequences[1]
    assert sequence.computed == 7
    house.executor.blocks.clear()
    house.scheduler.tiers.restore(sequence)
    await house.broker.settle()
    assert ids_of(house) == expected_ids(PROMPT, 7, 0, 4)


async def test_a_new_arena_generation_is_mapped_only_when_the_old_one_is_released(house: House) -> None:
    house.scheduler.pause_after[1] = 2
    await house.ask(PROMPT, max_tokens=4)
    house.transcript.clear()
    house.kv.new_arena()
    house.runtimes["kv_offload.host.a"].send_heartbeat()
    await house.broker.settle()
    assert house.transcript == ["E>S ArenaReleased", "S>K ArenaReleased"]
    assert house.kv.allocated
    assert house.executor.mapped == 2

    house.transcript.clear()
    house.scheduler.tiers.restore(house.scheduler.sequences[1])
    await house.broker.settle()
    assert house.transcript[:4] == ["S>K KvPrefetch", "K>S KvReady", "S>E SlotOpen", "S>E StepPlan"]
    assert ids_of(house) == expected_ids(PROMPT, 7, 0, 4), "what is gone is computed again"


async def test_a_copy_into_an_arena_that_is_gone_is_refused_and_the_pause_still_works(house: House) -> None:
    house.executor.mapped = 9
    house.scheduler.pause_after[1] = 2
    await house.ask(PROMPT, max_tokens=4)
    sequence = house.scheduler.sequences[1]
    assert (sequence.state, sequence.computed) == ("paused", 0)
    assert house.arena == {}
    house.scheduler.tiers.restore(sequence)
    await house.broker.settle()
    assert ids_of(house) == expected_ids(PROMPT, 7, 0, 4)


async def test_an_executor_restart_goes_on_with_the_same_ids(house: House) -> None:
    house.executor.die_at_step = 4
    frames = await house.ask(PROMPT, n=2, max_tokens=6)
    dead = house.runtimes["executor.e0"]
    assert isinstance(dead.failure, RuntimeError)
    assert len(ids_of(house)) == 3
    await house.kill("executor.e0")
    house.transcript.clear()

    house.executor = FakeExecutor(house.arena)
    runtime = await house.add(house.executor, "e0")
    assert runtime.mailbox.epoch > dead.mailbox.epoch
    to_executor = [line for line in house.transcript if line.startswith("S>E") or "ExecHello" in line]
    assert to_executor[:5] == [
        "E>S ExecHello",
        "S>E ExecWelcome",
        "S>E SlotOpen",
        "S>E SlotOpen",
        "S>E StepPlan",
    ]
    assert "S>E StreamReset 8" in to_executor, "the newcomer joins the stream where the scheduler stands"
    assert house.executor.resets == 0, "joining is not a loss"
    for choice in (0, 1):
        ids = expected_ids(PROMPT, 7, choice, 6)
        assert ids_of(house, 1 + choice) == ids
        assert frames.text(choice) == text_of(ids)


async def test_a_plan_for_the_dead_incarnation_never_reaches_the_new_one(house: House) -> None:
    """The scheduler sends to the mailbox before it has seen the restart."""
    await house.ask(PROMPT, max_tokens=2)
    await house.kill("executor.e0")
    await house.ask(PROMPT, "r2", max_tokens=3)
    assert ids_of(house, 2) == []
    house.executor = FakeExecutor(house.arena)
    await house.add(house.executor, "e0")
    assert ids_of(house, 2) == expected_ids(PROMPT, 7, 0, 3)
    assert house.executor.resets == 0


async def test_a_cancel_overtakes_its_request(house: House) -> None:
    house.client.publish("headrace.v1.cancel.public.r1", b"")
    await house.broker.settle()
    assert house.scheduler.tombstones == {("public", "r1")}
    frames = await house.ask(PROMPT)
    assert house.transcript == ["T>S Tokenized", "S>T Rejected"]
    assert frames.bodies == [{"error": 499}]
    assert house.scheduler.sequences == {}


async def test_a_cancel_of_a_running_request(house: House) -> None:
    house.broker.drop("hr.f.executor.e0.in.StepPlan")
    frames = await house.ask(PROMPT)
    house.client.publish("headrace.v1.cancel.public.r1", b"")
    await house.broker.settle()
    await house.tick()
    assert frames.of(0) == [{"accepted": True}, {"done": 0, "reason": "error", "code": 499}]
    assert final_of(house) == ("ended", 0, "error")


@pytest.mark.parametrize("grammar", ["good", "bad"])
async def test_no_row_is_planned_before_its_grammar_is_ready(house: House, grammar: str) -> None:
    frames = await house.ask(PROMPT, grammar=grammar, max_tokens=1)
    if grammar == "good":
        assert house.transcript[3:6] == ["S>E SlotOpen", "E>S GrammarReady", "S>E StepPlan"]
        assert final_of(house) == ("ended", 1, "length")
    else:
        assert house.transcript[3:5] == ["S>E SlotOpen", "E>S GrammarFailed"]
        assert "S>E StepPlan" not in house.transcript
        assert frames.of(0)[-1] == {"done": 0, "reason": "error", "code": 400}


async def test_a_dead_detokenizer_is_replaced_and_gets_all_tokens(house: House) -> None:
    house.scheduler.pause_after[1] = 2
    frames = await house.ask(PROMPT, max_tokens=4)
    await house.kill("detokenizer.d0")
    house.detokenizer = FakeDetokenizer()
    await house.add(house.detokenizer, "d1")
    house.transcript.clear()
    await house.tick(4)
    assert house.between("D") == ["S>D Open"]
    house.scheduler.tiers.restore(house.scheduler.sequences[1])
    await house.broker.settle()
    ids = expected_ids(PROMPT, 7, 0, 4)
    texts = [frame for frame in frames.of(0) if "text" in frame]
    assert [frame["first"] for frame in texts] == [0, 1, 0, 2, 3], "tokens 0 and 1 come again, at index 0"
    assert "".join(frame["text"] for frame in texts[2:]) == text_of(ids)
    assert final_of(house) == ("ended", 4, "length")


async def test_a_detokenizer_that_was_only_stopped_drops_what_another_has(house: House) -> None:
    house.scheduler.pause_after[1] = 2
    await house.ask(PROMPT, max_tokens=4)
    stopped, sleeper = house.detokenizer, house.runtimes.pop("detokenizer.d0")
    house.detokenizer = FakeDetokenizer()
    await house.add(house.detokenizer, "d1")
    await house.tick(4)
    assert list(house.detokenizer.open) == list(stopped.open) == [1]
    house.runtimes["detokenizer.d0"] = sleeper
    await house.tick()
    assert stopped.open == {}
    assert list(house.detokenizer.open) == [1]
    house.scheduler.tiers.restore(house.scheduler.sequences[1])
    await house.broker.settle()
    assert final_of(house) == ("ended", 4, "length")


async def test_a_scheduler_restart_ends_its_streams_with_an_error(house: House) -> None:
    house.scheduler.pause_after[1] = 2
    frames = await house.ask(PROMPT, max_tokens=4)
    await house.kill("scheduler.s0")
    house.executor.slots.clear()
    house.scheduler = type(house.scheduler)()
    await house.add(house.scheduler, "s0")
    assert frames.of(0)[-1] == {"error": 503}
    house.executor.hello()
    again = await house.ask(PROMPT, "r2", max_tokens=2)
    assert again.text(0) == text_of(expected_ids(PROMPT, 7, 0, 2))


async def test_a_prompt_of_many_parts_arrives_whole_although_one_part_is_lost(house: House) -> None:
    prompt = [i % 50 for i in range(30_000)]
    house.broker.drop("hr.f.executor.e0.in.SlotOpen", times=1)
    await house.ask(prompt, max_tokens=1)
    assert house.transcript[:3] == ["T>S Tokenized"] * 3
    assert house.transcript.count("S>E SlotOpen") == 2
    assert ids_of(house) == expected_ids(prompt, 7, 0, 1)
