"""The table of aliases: how requests are split, that a resend stays, and that holders end with one table."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.aliases import (
    MAX_ALIASES,
    REMEMBERED,
    REMEMBERED_US,
    SETTLED_US,
    Alias,
    Aliases,
    read_targets,
)
from shared.bodies import decode
from shared.errors import BadRequest

REQUESTS = 2_000


class Clock:
    now_us = 0

    def __call__(self) -> int:
        return self.now_us


def split(alias: Alias, prefix: str = "r") -> Counter[str]:
    return Counter(alias.model_for("public", f"{prefix}{number}") for number in range(REQUESTS))


@pytest.mark.parametrize("prefix", ["r", "chatcmpl-", "batch_1."])
@pytest.mark.parametrize("canary", [1, 5, 95])
def test_a_canary_gets_its_part_within_one_percent(prefix: str, canary: int) -> None:
    found = split(Alias("chat", 1, (("big", 100 - canary), ("new", canary))), prefix)
    assert abs(found["new"] - REQUESTS * canary / 100) <= REQUESTS / 100
    assert found.total() == found["big"] + found["new"]


def test_more_weight_moves_requests_to_one_model_alone() -> None:
    before, after = (Alias("chat", 1, (("big", big), ("new", 5), ("old", 20))) for big in (75, 175))
    moved = Counter(
        (before.model_for("t", f"{n}"), after.model_for("t", f"{n}"))
        for n in range(REQUESTS)
        if before.model_for("t", f"{n}") != after.model_for("t", f"{n}")
    )
    assert moved
    assert {to for _, to in moved} == {"big"}


def test_two_aliases_and_two_tenants_split_apart() -> None:
    """Else the same requests would always be the ones that a canary gets."""
    half = (("big", 1), ("new", 1))
    one = [Alias("chat", 1, half).model_for("a", f"{n}") for n in range(REQUESTS)]
    for other in (Alias("code", 1, half), "b"):
        alias, tenant = (other, "a") if isinstance(other, Alias) else (Alias("chat", 1, half), other)
        same = sum(model == alias.model_for(tenant, f"{n}") for n, model in enumerate(one))
        assert abs(same - REQUESTS / 2) < REQUESTS / 20


def test_a_resend_stays_while_it_is_remembered() -> None:
    clock = Clock()
    table = Aliases(clock)
    assert table.resolve("chat", "t", "r") is None
    assert table.apply(Alias("chat", 1, (("big", 1),)))
    assert table.resolve("chat", "t", "r") == "big"
    assert table.apply(Alias("chat", 2, (("new", 1),)))
    assert table.resolve("chat", "t", "r") == "big"
    assert table.resolve("chat", "t", "s") == "new"
    assert table.apply(Alias("chat", 3, ()))
    assert table.resolve("chat", "t", "r") == "big"
    assert table.resolve("chat", "t", "u") is None
    clock.now_us = REMEMBERED_US
    assert table.resolve("chat", "t", "r") is None


def test_the_others_take_the_part_of_a_model_that_has_gone() -> None:
    clock, there = Clock(), {"big", "new", "old"}
    table = Aliases(clock)
    table.apply(Alias("chat", 1, (("big", 60), ("new", 30), ("old", 10))))
    before = {f"{n}": table.resolve("chat", "t", f"{n}") for n in range(REQUESTS)}
    table.is_there = there.__contains__
    there.remove("new")
    after = {request: table.resolve("chat", "t", request) for request in before}
    assert "new" not in after.values()
    assert all(after[request] == model for request, model in before.items() if model != "new")
    moved = Counter(after[request] for request, model in before.items() if model == "new")
    assert moved["old"] == pytest.approx(sum(moved.values()) / 7, rel=0.3)  # of 60 + 10
    other = Aliases(clock)  # another holder, which has never seen these requests
    other.apply(Alias("chat", 1, (("big", 60), ("new", 30), ("old", 10))))
    other.is_there = there.__contains__
    assert {request: other.resolve("chat", "t", request) for request in after} == after
    there.clear()
    assert table.resolve("chat", "t", "another") in ("big", "new", "old")  # refused with the name


def test_the_oldest_requests_are_forgotten_first() -> None:
    table = Aliases(Clock())
    table.apply(Alias("chat", 1, (("big", 1),)))
    for number in range(REMEMBERED + 1):
        table.resolve("chat", "t", f"{number}")
    table.apply(Alias("chat", 2, (("new", 1),)))
    assert table.resolve("chat", "t", "1") == "big"
    assert table.resolve("chat", "t", "0") == "new"


def test_changes_in_any_order_and_twice_make_one_table() -> None:
    changes = [
        Alias("chat", 1, (("big", 1),)), Alias("chat", 2, (("big", 95), ("new", 5))), Alias("chat", 3, ()),
        Alias("code", 2, (("new", 1),)),
    ]  # fmt: skip
    tables = []
    for order in permutations(changes):
        table = Aliases(Clock())
        for change in (*order, *order):
            table.apply(change)
        tables.append((table.pack(), table.stamp, table.all()))
    assert {tuple(each[2]) for each in tables} == {(changes[3],)}
    assert {each[1] for each in tables} == {5}
    other = Aliases(Clock())
    other.apply_all(tables[0][0])
    assert (other.all(), other.stamp) == ([changes[3]], 5)
    for odd in (b"[1]", b'[{"name": "chat"}]', b"{", b"\xff"):  # of another version: it raises nothing
        other.apply_all(odd)
    assert (other.all(), other.stamp) == ([changes[3]], 5)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30)), max_size=12, unique_by=lambda c: c[1]))
def test_holder_with_the_lower_stamp_queries_until_both_are_equal(changes: list[tuple[str, int]]) -> None:
    one, two = Aliases(Clock()), Aliases(Clock())
    for place, (name, exponent) in enumerate(changes):  # no two sums of these versions are equal
        (one if place % 2 else two).apply(Alias(name, 3**exponent, (("big", exponent + 1),)))
    for low, high in ((one, two), (two, one), (one, two)):
        if low.stamp < high.stamp:
            low.apply_all(high.pack())
    assert (one.all(), one.stamp) == (two.all(), two.stamp)


def test_a_later_change_has_a_higher_version_also_if_the_clock_goes_back() -> None:
    table = Aliases(Clock())
    first = table.next("chat", [("big", 1)], 1_000)
    assert first == Alias("chat", 1_000, (("big", 1),))
    table.apply(first)
    assert table.next("chat", [], 10).version == 1_001
    assert table.next("chat", [], 2_000).version == 2_000
    assert decode(Alias, b'{"name": "chat", "version": 1000, "targets": [["big", 1]]}') == first


def test_a_name_is_settled_some_time_after_its_change() -> None:
    clock = Clock()
    table = Aliases(clock)
    clock.now_us = 10 * SETTLED_US
    assert table.is_settled("chat", 0)
    table.apply(Alias("chat", 1, (("big", 1),)))
    assert not table.is_settled("chat", clock.now_us)
    assert not table.is_settled("chat", clock.now_us + SETTLED_US - 1)
    assert table.is_settled("chat", clock.now_us + SETTLED_US)


def test_a_full_table_takes_changes_and_no_new_names() -> None:
    table = Aliases(Clock())
    for number in range(MAX_ALIASES):
        assert table.apply(Alias(f"a{number}", 1, (("big", 1),)))
    assert (table.has_room("more"), table.has_room("a0")) == (False, True)
    assert not table.apply(Alias("more", 1, (("big", 1),)))
    assert table.apply(Alias("a0", 2, ()))
    assert (table.get("a0"), table.get("more"), len(table.all())) == (None, None, MAX_ALIASES - 1)
    assert table.stamp < 2**63


def test_the_stamp_of_a_full_table_fits_into_a_heartbeat() -> None:
    assert MAX_ALIASES * 4_102_444_800_000_000 < 2**63  # µs until the year 2100


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "JSON object"), (b"[1]", "JSON object"), (b"[" * 100_000, "JSON object"),
        (b'{"a": 0}', "weight of 'a' is 0"), (b'{"a": -1}', "is -1"), (b'{"a": 1.5}', "is 1.5"),
        (b'{"a": true}', "is True"), (b'{"a": "1"}', "is '1'"), (b'{"a": 1000001}', "from 1 to 1000000"),
        (b'{"": 1}', "not a name"), (b'{"a\\n": 1}', "not a name"),
        (b"{%b}" % b",".join(b'"%d": 1' % n for n in range(17)), "at most 16"),
    ],
)  # fmt: skip
def test_wrong_weights_are_refused(data: bytes, why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        read_targets(data)


def test_weights_are_read_in_their_order() -> None:
    assert read_targets(b'{"b": 5, "a": 95}') == {"b": 5, "a": 95}
    assert read_targets(b"{}") == {}
