"""Policies by name: what is found, the error of a wrong name, and what the small ones decide."""

from __future__ import annotations

import pytest

from loadtest import policies as baselines
from services.scheduler.state import policies
from services.scheduler.state.policies import (
    KINDS,
    MOVED,
    STALL_US,
    BatchingView,
    Policy,
    RoutingOption,
    StepShare,
    load,
    parse,
)
from shared.errors import SetupError


def test_every_name_is_a_function() -> None:
    found = {load(kind, name) for kind, (names, _) in KINDS.items() for name in names}
    assert len(found) == sum(len(names) for names, _ in KINDS.values())


def test_unnamed_policy_stays() -> None:
    assert (
        str(parse(""))
        == "order=vtc,batching=mixed,reservation=on_demand,victim=latest,routing=ttft,tier=tiered,"
        "roles=colocated,sessions=learned"
    )
    assert parse("reservation=reserve, order=fcfs") == Policy(reservation="reserve", order="fcfs")
    assert parse("batching=decode_first", Policy(reservation="reserve")) == Policy(
        batching="decode_first", reservation="reserve"
    )


def test_a_policy_of_ones_own() -> None:
    policy = parse("reservation=services.scheduler.state.policies:reserve")
    assert policy.function("reservation") is policies.reserve


def test_traits_equal_the_functions_traits() -> None:
    traits = ("fair", "closed", "greedy", "looks_ahead", "no_tiers", "forgets", "leaves", "ahead")
    assert {name for name in traits if getattr(Policy(), name)} == {"fair", "ahead"}
    assert parse("reservation=foreseen").looks_ahead
    assert not parse("order=fcfs").fair


def test_names_that_have_moved_are_accepted_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    for kind, names in MOVED.items():
        for name in names:
            moved = f"loadtest.policies:{name}"
            assert parse(f"{kind}={name}").function(kind) is load(kind, moved)
            assert caplog.messages[-1] == f"policy {kind}={name}: write {kind}={moved}"
    with pytest.raises(SetupError, match="reservation='static' is none of on_demand"):
        parse("reservation=static")


def test_kinds_that_have_new_names_are_accepted_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    old = "rank=fcfs,fill=decode_first,kv=reserve,place=room"
    new = Policy(order="fcfs", batching="decode_first", reservation="reserve", routing="room")
    assert parse(old) == new == parse(str(new))
    assert caplog.messages[0] == "policy rank=fcfs: write order=fcfs"
    assert len(caplog.messages) == 4


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("speed=high", "there is no 'speed', only order, batching, reservation, victim, routing"),
        ("order=best", "order='best' is none of vtc, fcfs, nor module:function"),
        ("order=no.such:thing", "cannot be loaded"),
        ("order=services.scheduler.state.policies:nothing", "cannot be loaded"),
        ("order=services.scheduler.state.policies:STALL_US", "is no function of"),
        (
            "order=services.scheduler.state.policies:mixed",
            "is no function of .arrival_us, number, served_tokens.: see .*policies.py",
        ),
    ],
)
def test_wrong_policy_is_an_error_that_names_the_flaw(text: str, why: str) -> None:
    with pytest.raises(SetupError, match=why):
        parse(text)


@pytest.mark.parametrize(
    ("fill", "view", "share"),
    [
        (policies.mixed, BatchingView(3, 2, 0), StepShare(True, "budget")),
        (policies.prefill_first, BatchingView(3, 2, 0), StepShare(False, "whole")),
        (policies.prefill_first, BatchingView(3, 2, STALL_US), StepShare(True, "none")),
        (policies.prefill_first, BatchingView(3, 0, 0), StepShare(True, "none")),
        (policies.decode_first, BatchingView(3, 2, 0), StepShare(True, "block")),
        (policies.decode_first, BatchingView(0, 2, 0), StepShare(True, "whole")),
    ],
)
def test_batching_policy_gives_the_share_of_a_step(
    fill: object, view: BatchingView, share: StepShare
) -> None:
    assert fill(view) == share  # type: ignore[operator]  # one of the functions above


def test_reservation_policies_reserve_these_blocks() -> None:
    sizes = [(3, 20, 4), (4, 20, 4), (20, 20, 4)]
    assert [policies.on_demand(*size) for size in sizes] == [1, 2, 5]
    assert [policies.reserve(*size) for size in sizes] == [5, 5, 5]


@pytest.mark.parametrize(
    ("paused", "pressed", "chance_pm", "recompute_us", "what"),
    [
        (True, True, 1_000, 101, "copy"),
        (True, True, 1_000, 99, "drop"),  # a copy takes 100
        (True, True, 1_000, 0, "copy"),  # nothing is known yet
        (True, False, 1_000, 101, "keep"),
        (False, True, 250, 401, "copy"),
        (False, True, 250, 399, "drop"),
        (False, True, 1, 100_001, "copy"),  # the cost alone decides
        (False, True, 0, 10_000_000, "drop"),
        (False, False, 250, 401, "copy"),  # ahead of need
        (False, False, 249, 10_000, "keep"),
    ],
)
def test_tier_policy_decides_about_a_block(
    paused: bool, pressed: bool, chance_pm: int, recompute_us: int, what: str
) -> None:
    view = policies.OffloadView(paused, pressed, True, chance_pm, 100, recompute_us)
    assert policies.tiered(view) == what


def test_routing_policies_choose_their_executors() -> None:
    load = baselines.LOAD_TOKENS
    options = [
        RoutingOption("e1", 0, 9, 1),
        RoutingOption("e2", 2 * load + 1, 5, 3),
        RoutingOption("e3", 2 * load + 1, 6, 3),
    ]
    assert baselines.prefix(options).source == "e3"
    assert baselines.prefix([*options, RoutingOption("e4", 2 * load, 9, 2)]).source == "e4"
    assert policies.room(options).source == "e1"
    assert policies.room([RoutingOption("e1", 0, 9, 2), RoutingOption("e2", 0, 9, 1)]).source == "e2"
