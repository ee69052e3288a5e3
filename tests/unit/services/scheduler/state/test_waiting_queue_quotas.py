"""Quotas: what a file may hold, and what a tenant may take within any time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.state import waiting_queue
from services.scheduler.state.waiting_queue import MINUTE_US, Quotas, read_quotas
from shared.nats.subjects import PROBE_TENANT


def test_a_file_has_a_line_for_each_tenant() -> None:
    text = "# a comment\nacme 60 100000\nother - 5 # no limit of requests\n\n* 20 -\n"
    assert read_quotas(text) == {"acme": (60, 100_000), "other": (0, 5), "*": (20, 0)}


@pytest.mark.parametrize(
    "line", ["acme", "acme 1", "acme 1 2 3", "acme x 2", "acme 0 1", "acme -1 1", "a" * 129 + " 1 1"]
)
def test_a_wrong_line_is_named(line: str) -> None:
    with pytest.raises(ValueError, match="line 2: `tenant requests tokens`"):
        read_quotas(f"ok 1 1\n{line}\n")


def limited(requests: int, tokens: int) -> Quotas:
    found = Quotas()
    found.set([("acme", requests, tokens)])
    return found


def test_a_minutes_requests_at_once_then_one_after_the_other() -> None:
    acme = limited(3, 0)
    for _ in range(3):
        assert acme.wait("acme", 0) is None
        acme.charge("acme", 0, requests=1, tokens=10**9)
    assert acme.wait("acme", 0) == ("3 requests a minute", 20_000_000)
    assert acme.wait("acme", 19_999_999) == ("3 requests a minute", 1)
    assert acme.wait("acme", 20_000_000) is None
    assert acme.wait("bob", 0) is None


def test_a_long_answer_is_paid_for_afterwards() -> None:
    acme = limited(0, 600)
    acme.charge("acme", 0, requests=1, tokens=599)
    assert acme.wait("acme", 0) is None, "a token is left"
    acme.charge("acme", 0, requests=0, tokens=601)
    assert acme.wait("acme", 0) == ("600 tokens a minute", 60_100_000)
    assert acme.wait("acme", 60_100_000) is None


def test_a_star_is_for_all_others_each_by_itself() -> None:
    found = Quotas()
    found.set([("acme", 100, 0), ("*", 1, 0)])
    found.charge("bob", 0, requests=1, tokens=0)
    found.charge("acme", 0, requests=1, tokens=0)
    assert found.wait("bob", 0) is not None
    assert found.wait("eve", 0) is found.wait("acme", 0) is None
    found.charge(PROBE_TENANT, 0, requests=9, tokens=0)
    assert found.wait(PROBE_TENANT, 0) is None, "a full quota makes no model unhealthy"


def test_new_quotas_hold_at_once_and_forget_nothing() -> None:
    acme = limited(10, 0)
    acme.charge("acme", 0, requests=10, tokens=0)
    acme.set([("acme", 600, 0)])
    assert acme.wait("acme", 0) == ("600 requests a minute", 100_000)
    acme.set([])
    assert acme.wait("acme", 0) is None


def test_tenants_that_come_once_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_queue, "MAX_BUCKETS", 100)
    found = Quotas()
    found.set([("*", 1, 5)])
    for i in range(1_000):
        found.charge(f"t{i}", i * MINUTE_US // 50, requests=1, tokens=5)
    assert len(found.buckets) <= 100


@given(
    st.integers(1, 50),
    st.lists(st.tuples(st.integers(0, 20_000_000), st.integers(1, 30)), min_size=1, max_size=60),
)
def test_no_time_has_more_than_its_share_and_a_full_minute(amount: int, tries: list[tuple[int, int]]) -> None:
    """Each try comes some time after the one before, and costs some tokens if it is accepted. The time that a
    refusal names is right: a microsecond earlier is too early."""
    acme, now_us, accepted = limited(0, amount), 0, list[tuple[int, int]]()
    for after_us, tokens in tries:
        now_us += after_us
        refused = acme.wait("acme", now_us)
        if refused is None:
            acme.charge("acme", now_us, requests=1, tokens=tokens)
            accepted.append((now_us, tokens))
        else:
            _, wait_us = refused
            assert wait_us > 0
            assert acme.wait("acme", now_us + wait_us - 1) == (f"{amount} tokens a minute", 1)
            now_us += wait_us
            assert acme.wait("acme", now_us) is None
    for first in range(len(accepted)):
        since_us = accepted[first][0]
        for last in range(first, len(accepted)):
            taken = sum(tokens for _, tokens in accepted[first:last])  # the last may go below zero
            assert taken * MINUTE_US <= amount * (accepted[last][0] - since_us) + amount * MINUTE_US
