"""Which actors live: heartbeats come, stop coming, and belong to incarnations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shared.actor.membership import AGE, TOKENS, VOCABULARY, Peer, Peers, check_vocabulary, missing
from shared.errors import SetupError
from shared.messages import Heartbeat

BEAT = Heartbeat(kind="executor", actor="e0", host_id="h", state="ready", model="m", interval_us=100)


def test_news_are_a_new_actor_incarnation_state_arena_or_scheduler() -> None:
    peers = Peers()
    reported = [
        peers.update(5, BEAT, 0),
        peers.update(5, BEAT, 1),
        peers.update(5, replace(BEAT, load=(("rows", 3),)), 2),
        peers.update(5, replace(BEAT, state="draining"), 3),
        peers.update(6, replace(BEAT, state="draining"), 4),
        peers.update(6, replace(BEAT, state="draining", arena="a-1", arena_generation=1), 5),
        peers.update(6, replace(BEAT, state="draining", arena="a-1", arena_generation=1, scheduler="s0"), 6),
    ]
    assert reported == [True, False, False, True, True, True, True]


def test_heartbeat_of_a_past_incarnation_is_ignored() -> None:
    peers = Peers()
    peers.update(6, BEAT, 0)
    assert not peers.update(5, replace(BEAT, state="draining"), 1)
    peer = peers.get("executor.e0")
    assert peer is not None
    assert (peer.epoch, peer.heartbeat.state, peer.last_seen_us) == (6, "ready", 0)


def test_three_missed_heartbeats_of_its_own_interval_end_a_peer() -> None:
    peers = Peers()
    peers.update(1, BEAT, 0)
    peers.update(1, replace(BEAT, actor="slow", interval_us=1000), 0)
    assert peers.expire(300) == []
    assert [p.source for p in peers.expire(301)] == ["executor.e0"]
    assert peers.get("executor.e0") is None
    assert peers.expire(301) == []
    assert peers.update(1, BEAT, 302), "the same incarnation comes back: news again"


def test_peer_that_sends_a_goodbye_is_gone_at_once() -> None:
    peers = Peers()
    for actor, state in (("b", "stopped"), ("a", "failed"), ("c", "draining")):
        peers.update(1, replace(BEAT, actor=actor, state=state), 0)
    assert [p.source for p in peers.expire(0)] == ["executor.a", "executor.b"]
    assert peers.get("executor.c") is not None


def test_failed_incarnation_is_gone_with_its_last_heartbeat_and_ignored_from_then_on() -> None:
    peers, last = Peers(), Heartbeat(kind="executor", actor="e0", host_id="h", state="failed")
    peers.update(5, BEAT, 0)
    assert peers.end(5, last, 1) == Peer("executor.e0", 5, BEAT, 1)
    assert peers.end(5, last, 2) is None, "reported twice"
    assert not peers.update(5, BEAT, 3), "a heartbeat that was under way"
    assert peers.get("executor.e0") is None
    assert peers.end(7, last, 4) == Peer("executor.e0", 7, last, 4), "no heartbeat of it has come"


def test_new_incarnation_lives_on_when_the_death_of_the_one_before_is_announced() -> None:
    peers, last = Peers(), Heartbeat(kind="executor", actor="e0", host_id="h", state="failed")
    peers.update(5, BEAT, 0)
    peers.update(6, BEAT, 1)
    assert peers.end(5, last, 2) is None
    assert peers.ready("executor") == ["e0"]
    peers.end(6, last, 3)
    assert peers.update(7, BEAT, 4), "the next one counts"


def test_announced_death_is_reported_again_when_heartbeats_would_be_missed() -> None:
    """A late hello of the dead executor, read after the notice, must not make it serve for ever."""
    peers, last = Peers(), Heartbeat(kind="executor", actor="e0", host_id="h", state="failed")
    for actor in ("e0", "e1"):
        peers.update(5, replace(BEAT, actor=actor), 0)
        peers.end(5, replace(last, actor=actor), 1)
    peers.update(6, replace(BEAT, actor="e1"), 300)
    assert peers.expire(301) == []
    assert [p.source for p in peers.expire(302)] == ["executor.e0"], "e1 has a new incarnation"
    assert peers.ready("executor") == ["e1"]
    assert peers.expire(302) == []


def test_pardon_starts_the_silence_anew() -> None:
    peers = Peers()
    peers.update(1, BEAT, 0)
    peers.restart_timeouts(10_000)
    assert peers.expire(10_300) == []
    assert len(peers.expire(10_301)) == 1


def test_ready_lists_by_kind_and_model() -> None:
    peers = Peers()
    peers.update(1, replace(BEAT, actor="b"), 0)
    peers.update(1, replace(BEAT, actor="a", model="other"), 0)
    peers.update(1, replace(BEAT, actor="c", state="starting"), 0)
    peers.update(1, replace(BEAT, kind="tokenizer", actor="t"), 0)
    assert peers.ready("executor") == ["a", "b"]
    assert peers.ready("executor", "m") == ["b"]
    assert peers.ready("scheduler") == []


def test_models_are_the_models_of_ready_actors() -> None:
    peers = Peers()
    peers.update(1, replace(BEAT, actor="b"), 0)
    peers.update(1, replace(BEAT, actor="a", model="other"), 0)
    peers.update(1, replace(BEAT, actor="c", model="third", state="starting"), 0)
    peers.update(1, replace(BEAT, actor="d", model=""), 0)
    assert peers.models("executor") == ["m", "other"]


def fleet(*heartbeats: Heartbeat) -> Peers:
    peers = Peers()
    for heartbeat in heartbeats:
        peers.update(1, heartbeat, 0)
    return peers


SCHEDULERS = [replace(BEAT, kind="scheduler", actor=name) for name in ("s0", "s1")]


def test_scheduler_without_executors_gets_no_request_while_another_has_some() -> None:
    assert fleet(*SCHEDULERS).serving("m") == ["s0", "s1"]
    assert fleet(*SCHEDULERS, BEAT).serving("m") == ["s0", "s1"], "it sends hello, or is of an older version"
    peers = fleet(*SCHEDULERS, replace(BEAT, scheduler="s1"), replace(BEAT, actor="e1", scheduler="s1"))
    assert (peers.serving("m"), dict(peers.executors_of("m"))) == (["s1"], {"s1": 2})
    peers.update(1, replace(BEAT, actor="e2", scheduler="s0"), 0)
    assert peers.serving("m") == ["s0", "s1"]


def test_executors_of_another_model_or_that_drain_do_not_count() -> None:
    other = replace(BEAT, model="other", scheduler="s0")
    peers = fleet(*SCHEDULERS, other, replace(BEAT, actor="e1", state="draining", scheduler="s1"))
    assert (peers.serving("m"), dict(peers.executors_of("m"))) == (["s0", "s1"], {})
    assert peers.serving("other") == []
    assert peers.draining("executor", "m") == ["e1"]


def test_missing_service_is_missing_for_its_model() -> None:
    kinds = ("tokenizer", "executor", "detokenizer")
    peers = fleet(SCHEDULERS[0], *(replace(BEAT, kind=kind) for kind in kinds))
    assert (missing(peers), missing(peers, "m")) == ([], [])
    assert missing(peers, "other") == ["tokenizer", "scheduler", "executor", "detokenizer"]


def test_a_model_has_a_digest_where_its_schedulers_agree() -> None:
    peers = Peers()
    scheduler = replace(BEAT, kind="scheduler", actor="s0", model_digest="aa")
    assert peers.model_digest("m") == ""
    peers.update(1, scheduler, 0)
    peers.update(1, replace(scheduler, actor="s1", model_digest=""), 0)  # it has no executor yet
    peers.update(1, replace(scheduler, actor="s2", model="other", model_digest="bb"), 0)
    peers.update(1, replace(BEAT, kind="tokenizer", actor="t0", aliases=("small",)), 0)
    assert [peers.model_digest(name) for name in ("m", "small", "other", "third")] == ["aa", "aa", "bb", ""]
    peers.update(1, replace(scheduler, actor="s1", model_digest="cc"), 0)
    assert peers.model_digest("m") == ""


@pytest.mark.parametrize("clock_us", [s * 1_000_000 for s in (0, 2, -2, 600, -600, 172_800, -172_800)])
@pytest.mark.parametrize(
    ("old_s", "new_s"), [(3_600, 10), (3_600, 3_590), (5, 0), (4, 1), (3, 1), (1, 0), (0, 0)]
)
def test_later_of_two_with_other_vocabularies_ends_at_any_setting_of_their_clocks(
    old_s: int, new_s: int, clock_us: int
) -> None:
    """The ages are of one moment, in each process; a heartbeat may be a second old."""
    old, new = 10**15, 10**15 + (old_s - new_s) * 1_000_000 + 1 + clock_us

    def ends(epoch: int, age_s: int, its_epoch: int, its_age_s: int, number: int) -> bool:
        load = ((VOCABULARY, 3 - number), (AGE, its_age_s))
        beat = Heartbeat(kind="tokenizer", actor="a", host_id="h", state="ready", model="m", load=load)
        try:
            check_vocabulary(Peer("tokenizer.a", its_epoch, beat, 0), "m", number, epoch, age_s)
        except SetupError:
            return True
        return False

    for late in (0, 1):
        new_ends = ends(new, new_s, old, max(old_s - late, 0), 1)
        old_ends = ends(old, old_s, new, max(new_s - late, 0), 2)
        assert new_ends or old_ends
        if clock_us == 0:
            assert new_ends
        if old_s - new_s > 5:
            assert (new_ends, old_ends) == (True, False)


@pytest.mark.parametrize(
    ("theirs", "other"),
    [
        ((), ""),
        ((("tokenizer", 7), ("detokenizer", 7)), ""),
        ((("tokenizer", 8), ("detokenizer", 7)), "tokenizer.0"),
        ((("tokenizer", 7), ("detokenizer", 8), ("detokenizer", 8)), "detokenizer.1"),
        ((("detokenizer", 8), ("detokenizer", 7)), ""),  # the later of the two ends by itself
        ((("tokenizer", 0), ("detokenizer", 0)), ""),  # of earlier versions
        ((("executor", 8), ("scheduler", 8)), ""),
    ],
)
def test_executor_compares_its_tokens_with_the_fleets(
    theirs: tuple[tuple[str, int], ...], other: str
) -> None:
    peers = Peers()
    for i, (kind, number) in enumerate(theirs):
        load = ((TOKENS, number),) if number else ()
        for model, answered in (("m", load), ("another", ((TOKENS, 9),))):
            actor = str(i) if model == "m" else f"{i}-{model}"
            beat = Heartbeat(kind=kind, actor=actor, host_id="h", state="ready", model=model, load=answered)
            peers.update(1, beat, 0)
    assert peers.of_other_tokens("m", 7) == other


def test_epoch_decides_for_an_earlier_version_that_sends_no_age() -> None:
    load = ((VOCABULARY, 2),)
    beat = Heartbeat(kind="tokenizer", actor="a", host_id="h", state="ready", model="m", load=load)
    check_vocabulary(Peer("tokenizer.a", 11, beat, 0), "m", 1, 10, 5)
    with pytest.raises(SetupError, match="serves another model under the name 'm'"):
        check_vocabulary(Peer("tokenizer.a", 9, beat, 0), "m", 1, 10, 5)
