"""Sessions as they come from requests: inferred from tips and calls, or named by clients; and their ends."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scheduler.fake_tier import FakeTier
from support.scheduler.world import World

from services.scheduler.core import Scheduler
from services.scheduler.reports import event_log
from services.scheduler.sessions import events, table
from services.scheduler.sessions.events import TOOL_LATE_US, Sessions
from services.scheduler.sessions.pauses import USER
from services.scheduler.sessions.table import SHARED_AT, Session
from services.scheduler.state.policies import Policy
from services.scheduler.state.requests import Arrived, BrokerBack, DrainRequested, Event, PeerDraining, Send
from services.scheduler.state.state import Limits
from shared.kv_blocks import KEY_BYTES, extend, root_key
from shared.messages import Cancel, KvForget, KvGone, SessionAnswer, SessionVerb, StepResult, ints

ID = "ab" * 16
BLOCK = 4
PROMPT = [number % 900 + 3 for number in range(90)]


def fresh(tier: FakeTier | None = None, **policy: str) -> World:
    world = World(Limits(policy=Policy(**policy)))
    world.add_engine(blocks=256, max_context=512, slots=8, block_tokens=BLOCK)
    if tier is not None:
        world.add_tier(tier)
    return world


def sessions_of(world: World) -> Sessions:
    sessions = world.scheduler.state.sessions
    assert isinstance(sessions, Sessions)
    return sessions


def asked(world: World, name: str, prompt: list[int], *calls: str, **more: object) -> list[int]:
    """The prompt and its answer."""
    world.calls[name] = calls
    world.ask(name, prompt, 6, **more)
    world.run()
    world.assert_answers(name)
    return [*prompt, *world.readers_of(name)[0].tokens]


def proven(world: World) -> list[Session]:
    return [session for session in sessions_of(world).table.by_name.values() if session.is_proven]


def held(world: World, tokens: list[int], tenant: str = "public", executor: str = "e1") -> int:
    """How many blocks of the tokens the device has, from the first on."""
    at, keys = world.scheduler.state.executors[executor], list[bytes]()
    extend(keys, root_key(at.hello.fingerprint, tenant), ints(tokens), BLOCK, len(tokens))
    return len(at.pool.match(keys))


def verb(world: World, do: str, session: str = ID, tenant: str = "public", **more: Any) -> SessionAnswer:
    asked = SessionVerb(tenant=tenant, session=session, verb=do, **more)
    answer = sessions_of(world).on_verb(world.scheduler.state, asked)
    world.tick(1_000)
    return answer


def test_answer_that_calls_begins_a_session_and_the_next_prompt_continues_it() -> None:
    world = fresh()
    history = asked(world, "first", PROMPT, "shell")
    (session,) = proven(world)
    assert (session.tool, session.turns, session.running, session.has_id) == ("shell", 1, 0, False)
    world.tick(2_000_000)
    asked(world, "second", [*history, *PROMPT[:10]], "read")
    assert proven(world) == [session]
    assert (session.tool, session.turns) == ("read", 2)
    learned = sessions_of(world).pauses.names["public", "shell", True]
    assert (learned.samples, learned.lost) == (1, 0)
    closed = world.readers_of("second")[0].closed
    assert closed is not None
    assert next(each.what for each in closed.decisions) == "session"
    assert closed.usage.cached_tokens == (len(history) - 1) // BLOCK * BLOCK


def test_prompt_that_extends_an_answer_without_calls_proves_the_session() -> None:
    world = fresh()
    history = asked(world, "first", PROMPT)
    assert proven(world) == []
    asked(world, "second", [*history, 7, 8, 9])
    (session,) = proven(world)
    assert session.turns == 2
    assert sessions_of(world).pauses.names["public", USER, False].samples == 1


def test_prompt_without_the_reasoning_of_the_last_answer_continues_the_session() -> None:
    world = fresh()
    asked(world, "first", PROMPT, "shell")
    asked(world, "second", [*PROMPT, 7, 7, 7, 7, 8, 9])
    (session,) = proven(world)
    assert session.turns == 2


def test_second_sample_and_branch_are_sessions_of_their_own() -> None:
    world = fresh()
    history = asked(world, "first", PROMPT, "shell")
    longer = asked(world, "second", [*history, *PROMPT[:40]], "shell")
    asked(world, "third", [*longer, *PROMPT[:40]], "shell")
    (session,) = proven(world)
    asked(world, "branch", [*longer, 5, 5, 5, 5, 5], "shell")  # leaves the chain before its last turn
    other = next(each for each in proven(world) if each is not session)
    assert (other.parent, other.turns, session.turns) == (session.name, 1, 3)


def test_tenants_with_one_prompt_have_two_sessions() -> None:
    world = fresh()
    history = asked(world, "first", PROMPT, "shell", tenant="a")
    asked(world, "second", [*history, 7], "shell", tenant="b")
    assert sorted((each.tenant, each.turns) for each in proven(world)) == [("a", 1), ("b", 1)]


def test_id_names_the_session_under_every_prompt() -> None:
    world = fresh()
    asked(world, "first", PROMPT, "shell", session=ID)
    asked(world, "second", PROMPT[::-1], "shell", session=ID, parent="cd" * 16)
    (session,) = proven(world)
    assert (session.name, session.turns, session.has_id) == (ID, 2, True)


def test_session_that_gets_an_id_at_its_second_request_goes_on_under_it() -> None:
    """As a chain of responses does, which has the id of its first one."""
    tier = FakeTier(capacity=256)
    world = fresh(tier)
    history = asked(world, "first", PROMPT, "shell")
    (session,) = proven(world)
    history = asked(world, "second", [*history, 7, 7], "shell", session=ID)
    assert proven(world) == [session]
    assert (session.name, session.turns, session.has_id) == (ID, 2, True)
    world.tick(TOOL_LATE_US + 1)
    asked(world, "third", [*history, 8], "shell", session=ID)
    learned = sessions_of(world).pauses.names["public", "shell", True]
    assert (learned.samples, learned.lost) == (2, 0)
    branch = [*history[:40], *[5] * 40]
    asked(world, "branch", branch, "shell", session="cd" * 16)
    assert session.name == ID
    assert len(proven(world)) == 2
    verb(world, "release")
    assert held(world, history) == SHARED_AT - 1  # the first counted key shows what is its own


def test_end_of_a_history_that_the_next_prompt_leaves_out_is_dead() -> None:
    world = fresh(FakeTier(capacity=256))
    history = asked(world, "first", PROMPT, "shell", session=ID)
    compacted = [*PROMPT[:40], *[5] * 30]
    asked(world, "second", compacted, "shell", session=ID)
    closed = world.readers_of("second")[0].closed
    assert closed is not None
    assert "superseded" in [each.what for each in closed.decisions]
    assert held(world, history) == SHARED_AT - 1  # the first counted key shows what is its own
    assert sessions_of(world).outcomes.superseded == 1


def test_call_beside_the_chain_of_its_session_kills_no_block() -> None:
    """Agents send the id of a session also with a prompt for its title, which shares a first line at most."""
    world = fresh(FakeTier(capacity=256))
    history = asked(world, "first", PROMPT, "shell", session=ID)
    asked(world, "title", [*PROMPT[:8], *[5] * 60], session=ID)
    assert held(world, history) == (len(history) - 1) // BLOCK
    asked(world, "second", [*history, 7, 7], "shell", session=ID)
    closed = world.readers_of("second")[0].closed
    assert closed is not None
    assert closed.usage.cached_tokens == (len(history) - 1) // BLOCK * BLOCK
    assert sessions_of(world).outcomes.superseded == 0


def test_final_request_ends_its_session_on_the_device_and_in_l1() -> None:
    tier = FakeTier(capacity=256)
    world = fresh(tier)
    for _ in range(3):  # reuse makes copies ahead of need
        history = asked(world, f"r{world.events}", PROMPT, "shell", session=ID)
    world.tick(300_000)
    world.run()
    for _ in range(20):
        world.tick(20_000)
        world.run()
    assert len(tier.l1) >= 20
    asked(world, "last", [*history, 7, 7, 7, 7], session=ID, session_final=True)
    assert proven(world) == []
    world.run()
    assert tier.counts[KvForget.__name__] >= 1
    assert len(tier.l1) < SHARED_AT
    assert held(world, history) < 16
    world.finish()


def test_blocks_of_two_sessions_die_with_the_second() -> None:
    world = fresh()
    asked(world, "a", [*PROMPT, *[5] * 40], "shell", session=ID)
    asked(world, "b", [*PROMPT, *[6] * 40], "shell", session="cd" * 16)
    assert verb(world, "release").will == "release"
    assert held(world, [*PROMPT, *[6] * 40]) == 32
    assert held(world, [*PROMPT, *[5] * 40]) < 32
    assert verb(world, "release", session="cd" * 16).will == "release"
    assert verb(world, "state", session="cd" * 16).state == "unknown"


def test_release_of_a_running_session_ends_it_after_its_request() -> None:
    world = fresh()
    asked(world, "first", PROMPT, "shell", session=ID)
    world.ask("second", PROMPT, 6, session=ID)
    assert verb(world, "release").will == "release"
    assert verb(world, "state").state == "running"
    world.run()
    world.assert_answers("second")
    assert verb(world, "state").state == "unknown"
    assert held(world, PROMPT) < 16


def test_release_with_the_tree_ends_what_the_session_has_started() -> None:
    world = fresh()
    names = [f"{number:032x}" for number in range(4)]
    for number, name in enumerate(names):
        parent = names[number - 1] if number else ""
        asked(world, name, [number + 5] * 60, "shell", session=name, parent=parent)
    asked(world, "other", [9] * 60, "shell", session=ID)
    assert verb(world, "release", names[1], tree=True).will == "release"
    assert sorted(session.name for session in proven(world)) == sorted([names[0], ID])


def test_verb_of_another_tenant_finds_nothing() -> None:
    world = fresh()
    asked(world, "first", PROMPT, "shell", session=ID)
    for do in ("state", "release", "keep", "prefetch"):
        assert verb(world, do, tenant="other").state == "unknown"
    assert len(proven(world)) == 1


def test_tenant_keeps_an_equal_part_and_its_first_keeps_go_first() -> None:
    world = fresh()
    names = [f"{number:032x}" for number in range(6)]
    for number, name in enumerate(names):
        asked(world, name, [number + 5] * 160, "shell", session=name)
    assert [verb(world, "keep", name, keep_us=10**9).will for name in names] == ["keep"] * 6  # alone
    asked(world, "other", [20] * 100, "shell", tenant="other", session=ID)
    assert verb(world, "keep", names[5], keep_us=10**9).will == "keep"  # 256 blocks / 2 tenants / 41 each
    kept = [name for name in names if verb(world, "state", name).kept_us]
    assert kept == names[3:]
    asked(world, "huge", [30] * 500, "shell", session="ff" * 16)
    answer = verb(world, "keep", "ff" * 16, keep_us=10**9)
    assert (answer.will, answer.why) == ("keep", "")  # 126 blocks of 128
    assert [name for name in names if verb(world, "state", name).kept_us] == []
    asked(world, "more", [20] * 100, "shell", tenant="third", session="aa" * 16)
    answer = verb(world, "keep", "ff" * 16, keep_us=10**9)
    assert (answer.will, answer.why) == ("nothing", "over the tenant's share")  # 85 blocks


def kept(world: World, names: list[str]) -> list[str]:
    return [name for name in names if verb(world, "state", name).kept_us]


def test_kept_sessions_that_grow_stay_within_the_part_of_their_tenant() -> None:
    world = fresh()
    names = [f"{number:032x}" for number in range(3)]
    asked(world, "other", [20] * 60, "shell", tenant="other", session=ID)  # a part has 128 blocks
    for number, name in enumerate(names):
        asked(world, name, [number + 5] * 160, "shell", session=name)
        assert verb(world, "keep", name, keep_us=10**9).will == "keep"
    assert kept(world, names) == names  # 41 blocks each
    asked(world, "grown", [7] * 200, "shell", session=names[2])
    assert kept(world, names) == names[1:]
    asked(world, "huge", [7] * 500, "shell", session=names[2])
    asked(world, "third", [21] * 60, "shell", tenant="third", session="aa" * 16)
    assert verb(world, "keep", names[2], keep_us=10**9).will == "nothing"  # 126 blocks of 85
    assert kept(world, names) == []


def test_session_whose_time_is_over_takes_no_part_from_one_that_is_kept() -> None:
    world = fresh()
    names = [f"{number:032x}" for number in range(4)]
    asked(world, "other", [20] * 60, "shell", tenant="other", session=ID)  # a part has 128 blocks
    for number, name in enumerate(names):
        asked(world, name, [number + 5] * 160, "shell", session=name)
    for name, keep_us in zip(names[:3], (10**9, 1_000_000, 10**9), strict=True):
        verb(world, "keep", name, keep_us=keep_us)
    world.tick(2_000_000)
    assert verb(world, "keep", names[3], keep_us=10**9).will == "keep"
    assert kept(world, names) == [names[0], names[2], names[3]]


def test_tenant_that_was_alone_keeps_its_part_alone_once_another_comes() -> None:
    """Where L1 evicts: else a kept session takes nothing from others."""
    world = fresh(FakeTier(capacity=256))
    names = [f"{number:032x}" for number in range(6)]
    for number, name in enumerate(names):
        asked(world, name, [number + 5] * 160, "shell", session=name)
        verb(world, "keep", name, keep_us=10**9)
    world.tick(TOOL_LATE_US + 1)
    asked(world, "other", [20] * 60, "shell", tenant="other", session=ID)
    assert kept(world, names) == names
    world.handle(Arrived("kv_offload.k1", KvGone(keys=b"")))
    for _ in range(10):
        world.tick(events.LOOK_US)
    assert len(kept(world, names)) == 3  # 256 blocks / 2 tenants / 41 each


def test_pause_across_a_lost_broker_teaches_nothing() -> None:
    world = fresh()
    history = asked(world, "first", PROMPT, "shell")
    world.tick(1_000_000)
    world.handle(BrokerBack())
    asked(world, "second", [*history, 7], "shell")
    assert sessions_of(world).pauses.names == {}
    assert proven(world)[0].turns == 2


def test_session_that_does_not_return_counts_as_lost_until_it_does() -> None:
    world = fresh()
    history = asked(world, "first", PROMPT, "shell")
    world.tick(TOOL_LATE_US)
    learned = sessions_of(world).pauses.names["public", "shell", True]
    assert (learned.samples, learned.lost) == (0, 1)
    world.tick(TOOL_LATE_US)
    assert learned.lost == 1
    asked(world, "second", [*history, 7], "shell")
    assert (learned.samples, learned.lost) == (1, 0)


def test_session_that_hardly_ever_returns_ends() -> None:
    world = fresh()
    for number in range(80):
        asked(world, f"r{number}", [number + 5] * 70, session=f"{number:032x}")
        world.tick(events.LATE_US)
    for _ in range(80):
        world.tick(events.LOOK_US)
    assert sessions_of(world).outcomes.over > 40
    assert len(proven(world)) < 40


@pytest.mark.parametrize("running", [True, False])
def test_chance_of_a_block_is_that_of_its_session(running: bool) -> None:
    world = fresh(FakeTier(capacity=256))
    asked(world, "first", [*PROMPT, *PROMPT], "shell", session=ID)
    state = world.scheduler.state
    (session,) = proven(world)
    (seq,) = session.seqs
    if running:
        world.ask("second", [9] * 30, 4, session=ID)
        assert state.sessions.chance_pm(state, seq, 40, "public") == 1_000
    else:
        soon = state.sessions.chance_pm(state, seq, 40, "public")
        world.tick(1_000_000_000)
        late = state.sessions.chance_pm(state, seq, 40, "public")
        assert 900 < soon <= 1_000
        assert late < 200
        assert state.sessions.chance_pm(state, 99, 40, "public") == state.reuse.chance_pm("public")
    world.finish()


@pytest.mark.parametrize("goes_on", [False, True])
def test_chain_that_a_branch_has_left_has_a_tenth_of_its_chance(goes_on: bool) -> None:
    world = fresh(FakeTier(capacity=256))
    history = asked(world, "first", PROMPT)
    longer = asked(world, "second", [*history, *PROMPT[:40]])
    whole = asked(world, "third", [*longer, *PROMPT[:40]])
    (old,) = proven(world)
    state, sessions = world.scheduler.state, sessions_of(world)
    branch = asked(world, "branch", [*longer, 5, 5, 5, 5, 5])
    if goes_on:
        whole = asked(world, "fourth", [*whole, 8, 8])
    asked(world, "branch goes on", [*branch, 6, 6, 6])
    other = next(each for each in proven(world) if each is not old)
    other.tool, other.idle_since_us = old.tool, old.idle_since_us
    assert sessions.again_pm(state, other) > 100
    assert sessions.again_pm(state, old) == sessions.again_pm(state, other) // (1 if goes_on else 10)
    asked(world, "last", [*whole, 7, 7])
    assert not old.is_left


@pytest.mark.parametrize("keeps_s", [0, 20, 1_000])
def test_kept_blocks_go_after_the_blocks_of_others_until_then(keeps_s: int) -> None:
    """Without a tier below: least recently used blocks go first, and a kept session is the oldest."""
    world = fresh()
    history = asked(world, "kept", PROMPT, "shell", session=ID)
    if keeps_s:
        assert verb(world, "keep", keep_us=keeps_s * 1_000_000).will == "keep"
    for number in range(40):
        asked(world, f"r{number}", [number + 300] * 80)
        world.tick(10_000_000)
    world.tick(events.LOOK_US)
    assert held(world, history) == ((len(history) - 1) // BLOCK if keeps_s == 1_000 else 0)
    assert len(world.scheduler.state.executors["e1"].pool.kept_until_us) == held(world, history)


PARENT = "cd" * 16


def child_of(world: World, *calls: str) -> list[int]:
    """A sub-agent has had two turns, with a pause of half a second, and its parent waits for a tool."""
    asked(world, "parent", PROMPT, "agent", session=PARENT)
    history = asked(world, "child", PROMPT[::-1], "shell", session=ID, parent=PARENT)
    world.tick(500_000)
    return asked(world, "child goes on", [*history, 7, 8], *calls, session=ID, parent=PARENT)


def test_sub_agent_whose_parent_went_on_with_its_answer_is_dead_after_ten_of_its_pauses() -> None:
    world = fresh()
    history = child_of(world)
    world.tick(20_000_000)
    assert len(proven(world)) == 2  # the parent still waits
    asked(world, "parent goes on", [*PROMPT, 5], "shell", session=PARENT)
    world.tick(events.LOOK_US)
    assert [session.name for session in proven(world)] == [PARENT]
    world.tick(1_000)
    assert held(world, history) == SHARED_AT - 1
    assert sessions_of(world).outcomes.over == 1


@pytest.mark.parametrize("why", ["it runs a tool", "it is kept", "it was idle for less", "it has come again"])
def test_sub_agent_that_may_go_on_beside_its_parent_lives(why: str) -> None:
    world = fresh()
    history = child_of(world, *(["build"] if why == "it runs a tool" else []))
    if why == "it is kept":
        verb(world, "keep", keep_us=10**9)
    asked(world, "parent goes on", [*PROMPT, 5], "shell", session=PARENT)
    if why == "it has come again":
        asked(world, "child again", [*history, 7, 8], session=ID, parent=PARENT)
    world.tick(4_000_000 if why == "it was idle for less" else 20_000_000)
    world.tick(events.LOOK_US)
    assert {session.name for session in proven(world)} == {ID, PARENT}


def test_policy_off_follows_no_session_and_a_change_forgets_all() -> None:
    world = fresh(sessions="off")
    asked(world, "first", PROMPT, "shell", session=ID)
    assert not world.scheduler.state.sessions.learns
    world.set_policy("sessions=learned")
    asked(world, "second", PROMPT, "shell", session=ID)
    assert len(proven(world)) == 1
    world.set_policy("sessions=off")
    assert world.scheduler.state.sessions.rows(world.scheduler.state, "", 9) == []


def test_table_of_abandoned_sessions_is_bounded() -> None:
    world = fresh()
    world.check_every = 0
    sessions, table = sessions_of(world), sessions_of(world).table
    first = Session("first", "t", (b"r", 4))
    sessions._begin(first)
    table.rest(first)
    sessions.young[first.name] = None
    for number in range(20_000):
        session = Session(f"s{number}", f"t{number % 7}", (b"r", 4))
        sessions._begin(session)
        table.rest(session)
        sessions.young[session.name] = None
    assert len(table.by_name) == len(sessions.young) <= 4_096


def test_keys_of_sessions_that_grow_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "MOST_KEY_BYTES", 100 * KEY_BYTES)
    world = fresh()
    names = [f"{number:032x}" for number in range(4)]
    for length in (60, 120, 180):  # 15, 30 and 45 blocks
        for number, name in enumerate(names):
            asked(world, f"{name}-{length}", [number + 5] * length, "shell", session=name)
        assert sessions_of(world).table.key_bytes <= 100 * KEY_BYTES
    assert {session.name for session in proven(world)} == set(names[-2:])


def check_chains(world: World) -> None:
    """Each tip is on the chain of its session's keys, and nothing is left of sessions that are over."""
    sessions, state = sessions_of(world), world.scheduler.state
    table = sessions.table
    for session in table.by_name.values():
        assert all(0 < tip.blocks <= session.blocks for tip in session.tips)
        idle = session.name in {**sessions.young, **sessions.working, **sessions.late}
        assert idle == (session.running == 0)
        of = table.tenants[session.tenant]
        assert (session.name in of.idle or session.name in of.guesses) == (session.running == 0)
    assert {*sessions.young, *sessions.working, *sessions.late} <= set(table.by_name)
    assert set(sessions.of_request) <= set(state.requests)
    assert set(sessions.parents) <= set(state.requests)
    assert {s.name for s in sessions.of_request.values()} <= set(table.by_name)
    for sequence in state.sequences.values():
        if sequence.keys:
            keys = list[bytes]()
            extend(keys, sequence.keyed[0], sequence.tokens, sequence.keyed[1], len(sequence.tokens))
            assert sequence.keys == keys[: len(sequence.keys)], "a key that is not of its tokens"


STEPS = st.tuples(
    st.integers(0, 3),  # which history
    st.sampled_from(
        ["go on", "branch", "cut", "new", "release", "keep", "prefetch", "cancel", "pause", "tier", "engine"]
    ),
    st.integers(1, 40),  # tokens
    st.booleans(),  # with an id
    st.booleans(),  # wait for the end
)


@settings(max_examples=60)
@given(st.lists(STEPS, max_size=25))
def test_any_requests_leave_keys_of_their_tokens_and_no_trace_of_sessions_that_are_over(
    steps: list[tuple[int, str, int, bool, bool]],
) -> None:
    world = fresh(FakeTier(capacity=64))
    world.checks.append(check_chains)
    histories = [[number + 5] * 30 for number in range(4)]
    for number, (of, what, tokens, named, waits) in enumerate(steps):
        name, history = f"r{number}", histories[of]
        if what in ("release", "keep", "prefetch"):
            verb(world, what, session=f"{of:032x}", keep_us=1_000_000)
            continue
        if what == "pause":
            world.tick(tokens * 2_000_000)
            continue
        if what == "tier":
            world.restart_tier()
            continue
        if what == "engine":
            world.crash("e1")
            world.add_engine("e1", epoch=number + 2, blocks=256, max_context=512, slots=8, block_tokens=BLOCK)
            continue
        cut = {
            "go on": len(history),
            "branch": len(history) // 2,
            "cut": 12,
            "new": 0,
            "cancel": len(history),
        }
        prompt = [*history[: cut[what]], *[7 + tokens % 5] * tokens][-400:]
        world.calls[name] = ("shell",) if tokens % 2 else ()
        world.ask(name, prompt, 5, session=f"{of:032x}" if named else "")
        histories[of] = prompt
        if what == "cancel":
            world.handle(Arrived("client", Cancel(tenant="public", request=name)))
            del world.asked[name]
        if waits:
            world.run()
            answers = world.readers_of(name)
            histories[of] = [*prompt, *(answers[0].tokens if answers else [])]
    world.finish()
    check_chains(world)


def test_snapshot_with_sessions_goes_on_with_the_same_commands() -> None:
    """A replay starts from a snapshot: all that a decision depends on is in it."""
    world = fresh(FakeTier(capacity=32))
    histories = [asked(world, f"r{number}", [number + 5] * 60, "shell", "read") for number in range(6)]
    world.tick(40_000_000)
    again = Scheduler(world.limits)
    again.state = event_log.restore(event_log.snapshot(world.scheduler.state))
    handle = world.scheduler.handle

    def on_both(event: Event, now_us: int) -> list[Send]:
        commands = handle(event, now_us)
        assert again.handle(event, now_us) == commands
        return commands

    world.scheduler.handle = on_both  # type: ignore[method-assign]
    for number, history in enumerate(histories):
        asked(world, f"s{number}", [*history, *[9] * 20], "shell", session=ID if number == 3 else "")
        world.tick(3_000_000)
    verb_of = SessionVerb(tenant="public", session=ID, verb="release", tree=True)
    world.handle(Arrived("client", verb_of))
    world.tick(50_000)
    assert event_log.state_hash(again.state) == event_log.state_hash(world.scheduler.state)
    assert sessions_of(world).pauses.names["public", "shell", True].samples >= 5


def test_hash_has_the_last_key_of_a_session_for_all_of_them() -> None:
    """The keys of a thousand sessions are 80 MB: a hash of them all would hold up steps for a second."""
    world = fresh()
    asked(world, "first", PROMPT, "shell")
    (session,) = proven(world)
    of = sessions_of(world).table
    assert session.last_key == session.key(session.blocks - 1)
    frozen = event_log.freeze(world.scheduler.state, event_log.NOT_HASHED)
    assert session.keys not in [value for row in frozen[1] for value in row[-1] if type(value) is bytes]
    before = event_log.state_hash(world.scheduler.state)
    of.set_keys(session, session.keys[:-KEY_BYTES])
    assert event_log.state_hash(world.scheduler.state) != before


def below(world: World, prompt: list[int]) -> list[int]:
    """A session whose blocks are all in L1, and none on the device. Returns its tokens."""
    for _ in range(3):
        history = asked(world, f"r{world.events}", prompt, "shell", session=ID)
    for _ in range(60):
        world.tick(200_000)
        world.run()
    pool = world.scheduler.state.executors["e1"].pool
    assert not pool.dirty_blocks
    for block in list(pool.clean):
        pool.forget(block)
    assert held(world, history) == 0
    return history


def test_prefetch_brings_the_blocks_up_and_the_next_request_finds_them() -> None:
    world = fresh(FakeTier(capacity=256))
    history = below(world, [*PROMPT, *PROMPT])
    answer = verb(world, "state")
    assert (answer.state, answer.device, answer.l1) == ("below", 0, answer.tokens)
    answer = verb(world, "prefetch")
    assert (answer.will, answer.why, answer.state) == ("prefetch", "", "below")
    world.run()
    assert held(world, history) == (len(history) - 1) // BLOCK
    assert verb(world, "prefetch").why == "on the device"
    asked(world, "next", [*history, 7, 7, 7], "shell", session=ID)
    outcomes = sessions_of(world).outcomes
    assert (outcomes.prefetched, outcomes.wasted) == ((len(history) - 1) // BLOCK, 0)
    assert not world.tier.leases
    world.finish()


def test_prefetch_takes_nothing_that_is_wanted_and_shows_why() -> None:
    world = fresh(FakeTier(capacity=256))
    assert verb(world, "prefetch").state == "unknown"
    below(world, PROMPT)
    pool = world.scheduler.state.executors["e1"].pool
    world.check_every = 0
    pool.reserve(pool.free_blocks)
    assert verb(world, "prefetch").why == "no room"
    pool.unreserve(pool.reserved)
    world.check_every = 4
    world.ask("next", PROMPT, 3, session=ID)
    assert verb(world, "prefetch").why == "a request of it runs"
    world.run()
    world.lose_tier()
    assert verb(world, "prefetch").why == "not found below"
    other = fresh()
    asked(other, "first", PROMPT, "shell", session=ID)
    assert verb(other, "prefetch").why == "not found below"


def test_prefetch_that_is_repeated_while_it_comes_loads_each_block_once() -> None:
    tier = FakeTier(capacity=256)
    world = fresh(tier)
    history = below(world, PROMPT)
    tier.frozen = True
    for _ in range(3):
        answer = verb(world, "prefetch")
        assert (answer.will, answer.why) == ("prefetch", "")
    blocks = (len(history) - 1) // BLOCK
    assert world.scheduler.state.executors["e1"].pool.copying_blocks == blocks
    assert sessions_of(world).outcomes.prefetched == blocks
    tier.thaw(world.now_us)
    world.run()
    assert held(world, history) == blocks
    world.finish()


@pytest.mark.parametrize("end", [DrainRequested(), PeerDraining("executor", "e1")])
def test_prefetch_starts_no_copy_for_which_a_drain_would_wait(end: Event) -> None:
    world = fresh(FakeTier(capacity=256))
    below(world, PROMPT)
    world.handle(end)
    assert verb(world, "prefetch").why == "the executor drains"
    assert world.scheduler.is_idle


def test_prefetch_goes_to_the_executor_that_stays() -> None:
    world = fresh(FakeTier(capacity=256))
    history = below(world, PROMPT)
    world.add_engine("e2", blocks=256, max_context=512, slots=8, block_tokens=BLOCK)
    world.handle(PeerDraining("executor", "e1"))
    assert verb(world, "prefetch").will == "prefetch"
    world.run()
    assert held(world, history, executor="e2") == (len(history) - 1) // BLOCK
    world.finish()


@pytest.mark.parametrize("copies", [False, True])
def test_prefetch_whose_copy_ran_while_a_step_failed_fills_no_block(copies: bool) -> None:
    """Nothing that the device held then can be trusted; a copy that begins later can."""
    world = fresh(FakeTier(capacity=256))
    history = below(world, PROMPT)
    world.ask("fails", [9] * 8, 9, tenant="other")
    verb(world, "prefetch")
    while copies and not world.copies["e1"]:
        assert world.deliver_tier()
    lost = world.results["e1"].popleft()
    failed = StepResult(
        exec_epoch=lost.exec_epoch,
        step=lost.step,
        ids=ints([-1] * len(lost.ids)),
        done=ints([0] * len(lost.ids)),
        error="boom",
    )
    world.handle(Arrived("executor.e1", failed))
    del world.asked["fails"]
    world.run()
    assert held(world, history) == (0 if copies else (len(history) - 1) // BLOCK)
    world.finish()


def test_prefetch_that_no_request_uses_is_wasted() -> None:
    world = fresh(FakeTier(capacity=256))
    history = below(world, PROMPT)
    verb(world, "prefetch")
    world.run()
    world.tick(60_000_000)
    asked(world, "next", [*history, 7], session=ID)
    outcomes = sessions_of(world).outcomes
    assert outcomes.wasted == outcomes.prefetched > 0


@pytest.mark.parametrize("fault", ["lost", "missing", "late", "engine"])
def test_prefetch_that_fails_leaves_its_blocks_empty(fault: str) -> None:
    tier = FakeTier(capacity=256)
    world = fresh(tier)
    history = below(world, PROMPT)
    if fault == "missing":
        tier.missing = True
    assert verb(world, "prefetch").will == "prefetch"
    if fault == "lost":
        world.lose_tier()
    elif fault == "late":
        tier.frozen = True
        world.tick(2_000_000)
        tier.thaw(world.now_us)
    elif fault == "engine":
        world.crash("e1")
        world.add_engine("e1", epoch=2, blocks=256, max_context=512, slots=8, block_tokens=BLOCK)
    world.run()
    assert fault == "late" or held(world, history) == 0
    asked(world, "next", [*history, 7], session=ID)
    tier.missing = False
    world.tick(200_000)
    world.finish()


@given(st.lists(st.tuples(st.integers(1, 90), st.integers(1, 30), st.booleans()), min_size=1, max_size=20))
def test_requests_that_share_nothing_get_the_commands_of_the_policy_off(
    asks: list[tuple[int, int, bool]],
) -> None:
    """Also with a small memory, where blocks are copied, dropped and evicted."""
    commands: list[list[Send]] = []
    for policy in ("off", "learned"):
        world = World(Limits(policy=Policy(sessions=policy)))
        world.add_engine(blocks=40, max_context=128, slots=4, block_tokens=BLOCK)
        world.add_tier(FakeTier(capacity=24))
        handle, sent = world.scheduler.handle, list[Send]()

        def noted(event: Event, now_us: int, handle: Any = handle, sent: list[Send] = sent) -> list[Send]:
            found: list[Send] = handle(event, now_us)
            sent += found
            return found

        world.scheduler.handle = noted  # type: ignore[method-assign]
        for number, (tokens, answer, waits) in enumerate(asks):
            world.ask(f"r{number}", [number + 10] * tokens, answer)
            if waits:
                world.run()
                world.tick(31_000_000)
        world.finish()
        commands.append(sent)
    assert commands[0] == commands[1]


def test_system_prompt_outlives_the_sessions_that_end_one_after_another() -> None:
    """Each program ends before the next one: the second computes the prompt once more, no later one."""
    world = fresh(FakeTier(capacity=256))
    cached = []
    for number in range(4):
        name = f"r{number}"
        prompt = [*[5] * 160, *[number + 10] * 80]
        asked(world, name, prompt, session=f"{number:032x}", session_final=True)
        world.tick(10_000)
        world.run()
        closed = world.readers_of(name)[0].closed
        assert closed is not None
        cached.append(closed.usage.cached_tokens)
    assert proven(world) == []
    assert cached[0] == 0
    assert cached[2] == cached[3] >= 128
