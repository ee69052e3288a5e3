"""Subjects: one token for any name, and the patterns that match them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.nats import subjects
from shared.nats.subjects import name_at, token, untoken

names = st.text(st.characters(exclude_categories=("Cs",)), min_size=1)


@given(names)
def test_any_name_survives(name: str) -> None:
    assert untoken(token(name)) == name
    assert re.fullmatch(r"[A-Za-z0-9_=-]+", token(name)), "nothing that means something to NATS"


@given(names, names)
def test_different_names_have_different_tokens(one: str, other: str) -> None:
    assert (token(one) == token(other)) == (one == other)


@given(st.text())
def test_untoken_undoes_token_or_refuses(text: str) -> None:
    try:
        name = untoken(text)
    except ValueError:
        return
    assert untoken(token(name)) == name


@pytest.mark.parametrize("text", ["", "a=", "a=4", "=4g", "= 4", "a.b", "a b", "=ff", "=FF", "é"])
def test_damaged_tokens_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        untoken(text)


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be empty"):
        token("")


def test_public_subjects_have_these_names() -> None:
    model = "Smol.v1 *>"
    assert subjects.generate("public", model) == "headrace.v1.generate.public.Smol=2Ev1=20=2A=3E"
    assert subjects.generate_any_tenant(model) == "headrace.v1.generate.*.Smol=2Ev1=20=2A=3E"
    assert subjects.tokenize("t", "m") == "headrace.v1.tokenize.t.m"
    assert subjects.tokenize_any_tenant("m") == "headrace.v1.tokenize.*.m"
    assert subjects.detokenize("t", "m") == "headrace.v1.detokenize.t.m"
    assert subjects.detokenize_any_tenant("m") == "headrace.v1.detokenize.*.m"
    assert subjects.cancel("acme", "é") == "headrace.v1.cancel.acme.=C3=A9"
    assert subjects.trace("r.1") == "headrace.v1.trace.r=2E1"
    assert name_at(subjects.generate("a.b", model), 3) == "a.b"
    assert name_at(subjects.generate("a.b", model), 4) == model


def test_internal_subjects_have_these_names() -> None:
    assert subjects.mailbox("f", "executor", "e0", "StepPlan") == "hr.f.executor.e0.in.StepPlan"
    assert subjects.mailbox_all("f", "executor", "e0") == "hr.f.executor.e0.in.*"
    assert subjects.heartbeat("f", "executor", "e0") == "hr.f.beat.executor.e0"
    assert subjects.heartbeat_all("f") == "hr.f.beat.*.*"
    assert subjects.heartbeat_request("f") == "hr.f.beat_ask"
    assert subjects.gone("d0", "r.1") == "_R.d0.r=2E1"
    assert subjects.gone_all("d0") == "_R.d0.*"


def test_an_actor_named_after_a_host_stays_one_token() -> None:
    host = "node1.example.com"
    mailbox = subjects.mailbox("f", "kv_offload", host, "Beat")
    assert mailbox == "hr.f.kv_offload.node1=2Eexample=2Ecom.in.Beat"
    assert subjects.mailbox_all("f", "kv_offload", host).count(".") == 5
    assert subjects.heartbeat("f", "kv_offload", host).count(".") == subjects.heartbeat_all("f").count(".")


@pytest.mark.parametrize(
    "subject",
    ["_INBOX.abc.1", "_INBOX.a", "my.app.answers", "hrx.a", "headracer", "r", "a" * 512, "ünï.cödé"],
)
def test_reply_subject_is_an_inbox(subject: str) -> None:
    assert subjects.is_inbox(subject)


@pytest.mark.parametrize(
    "subject",
    [
        "", "hr.default.scheduler.s1.in.Tokenized", "hr.beat_ask", "headrace.v1.generate.public.m",
        "_R.d1.5", "$JS.API.STREAM.DELETE.x", "$SYS.REQ", "a.*", ">", "a..b", ".a", "a.", "a b", "a\r\nPUB x",
        "a\x00", "a" * 513,
    ],
)  # fmt: skip
def test_no_answer_goes_to_a_subject_of_ours_or_to_none(subject: str) -> None:
    assert not subjects.is_inbox(subject)


def test_a_long_name_is_no_name() -> None:
    assert subjects.name_at(f"headrace.v1.cancel.t.{'a' * 128}", 4) == "a" * 128
    with pytest.raises(ValueError, match="at most 128"):
        subjects.name_at(f"headrace.v1.cancel.t.{'a' * 129}", 4)


def test_no_name_of_a_tenant_stands_for_all_tenants() -> None:
    made = [f for f in vars(subjects).values() if isinstance(f, subjects.Subject) and "tenant" in f.names]
    assert len(made) > 15
    for subject in made:
        parts = subject(*("*" if name == "tenant" else "x" for name in subject.names)).split(".")
        assert token("*") in parts, subject
        assert "*" not in parts, subject


def test_trace_request_of_a_tenant_is_distinguished_from_that_of_the_operator() -> None:
    assert subjects.asked_trace(b"") == ("", False)
    assert subjects.asked_trace(subjects.TRACE_STEPS) == ("", True)
    for tenant in ("acme", "steps", "a.b c", "é"):
        assert subjects.asked_trace(subjects.trace_body(tenant)) == (tenant, False)
    damaged = b"tenant =ZZ"
    assert subjects.asked_trace(damaged) == (damaged.decode(), False)
    assert subjects.asked_trace(b"tenant ")[0], "the tenant without a name is not the operator"
