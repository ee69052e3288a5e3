"""What is sent to a webhook, and where: signatures, the list of hosts, the plan of tries."""

from __future__ import annotations

import random

import pytest
from openai import OpenAI

from services.keeper.records import BATCH, REQUEST, RESPONSE, Hook, Work
from services.keeper.webhooks import (
    LAST_DELAY_US,
    MAX_TRIES,
    MAX_URL_CHARS,
    SPREAD,
    delay_us,
    event_of,
    read_hosts,
    signed,
    target_of,
)
from shared.bodies import encode
from shared.errors import BadRequest, EngineError

# The vector of the libraries of Standard Webhooks:
# https://github.com/standard-webhooks/standard-webhooks/blob/main/libraries/python/tests/test_webhooks.py
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
EVENT, AT_S, BODY = "msg_p5jXN8AQM9LWM0D4loKWxJek", 1_614_265_330, b'{"test": 2432232314}'
SIGNATURE = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
OTHER = "whsec_" + "B" * 32
HOSTS = f"""
good.example {SECRET}
good.example:8443 {SECRET} {OTHER}   # a new secret and the old one
http://127.0.0.1:9000 {SECRET}
http://[::1]:9000 {SECRET}
xn--bcher-kva.example {SECRET}
"""


def test_the_signature_is_that_of_the_specification() -> None:
    (secret,) = read_hosts(f"a {SECRET}")["https://a"]
    headers = {"webhook-id": EVENT, "webhook-timestamp": str(AT_S), "webhook-signature": SIGNATURE}
    assert signed(EVENT, AT_S, BODY, [secret]) == headers


def test_either_of_two_secrets_verifies_in_openais_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: AT_S)
    hook = Hook("https://a", RESPONSE, "acme", "resp_1", 5)
    body = encode(event_of(hook, {"status": "completed", "ended_at": AT_S, "answer": {"choices": []}}))
    headers = signed("evt_1", AT_S, body, read_hosts(HOSTS)["https://good.example:8443"])
    client = OpenAI(api_key="x")
    for secret in (SECRET, OTHER):
        event = client.webhooks.unwrap(body, headers, secret=secret)
        assert (event.type, event.data.id, event.created_at) == ("response.completed", "resp_1", AT_S)


@pytest.mark.parametrize(
    ("url", "origin", "path"),
    [
        ("https://good.example", "https://good.example", "/"),
        ("HTTPS://Good.EXAMPLE:443/a/B?c=d&e", "https://good.example", "/a/B?c=d&e"),
        ("https://good.example?x", "https://good.example", "/?x"),
        ("https://good.example:8443/", "https://good.example:8443", "/"),
        ("https://good.example:08443/", "https://good.example:8443", "/"),
        ("http://127.0.0.1:9000/@evil.example", "http://127.0.0.1:9000", "/@evil.example"),
        ("http://[::1]:9000/", "http://[::1]:9000", "/"),
        ("https://xn--bcher-kva.example/", "https://xn--bcher-kva.example", "/"),
    ],
)
def test_a_url_of_a_listed_host(url: str, origin: str, path: str) -> None:
    target = target_of(url)
    assert (target.origin, target.path) == (origin, path)
    assert origin in read_hosts(HOSTS)


@pytest.mark.parametrize(
    "url",
    [
        "http://good.example/",  # listed for https alone
        "https://good.example:80/",
        "http://good.example:443/",
        "https://good.example.evil.example/",
        "https://evil-good.example/",
        "https://sub.good.example/",
        "https://127.0.0.1:9000/",
        "http://127.0.0.1/",
        "http://127.1:9000/",
        "http://[::]:9000/",
        "http://[0:0:0:0:0:0:0:1]:9000/",  # another spelling
        "https://localhost/",
    ],
)
def test_a_url_of_another_host(url: str) -> None:
    assert target_of(url).origin not in read_hosts(HOSTS)


@pytest.mark.parametrize(
    "url",
    [
        "https://good.example@evil.example/",
        "https://good.example:pw@evil.example/",
        "https://evil.example\\@good.example/",
        "https://evil.example#@good.example/",
        "https://good.example#x",
        "https://good.example./",  # the same host for DNS, another one for certificates
        "https://.good.example/",
        "https://good..example/",
        "https://good%2eexample/",
        "https://b\u00fccher.example/",
        "https://good\u3002example/",  # a full stop for some parsers
        "https://\u212aood.example/",  # the Kelvin sign is a k in lower case
        "https://good.example/\u00fc",
        "https://good.example:/",
        "https://good.example:0/",
        "https://good.example:65536/",
        "https://good.example:4_43/",
        "https://good.example:443:443/",
        "https://good.example/ HTTP/1.1\r\nX: y",
        "https://good.example/\n",
        "https://good.example /",
        " https://good.example/",
        "https:/good.example/",
        "https://",
        "https:///path",
        "//good.example/",
        "ftp://good.example/",
        "file:///etc/passwd",
        "good.example",
        "https://" + "a" * MAX_URL_CHARS,
        "",
        7,
        None,
        ["https://good.example/"],
    ],
)
def test_invalid_webhook_url_is_refused(url: object) -> None:
    with pytest.raises(BadRequest) as caught:
        target_of(url)
    assert caught.value.param == "webhook"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a.example", "line 1: a secret is expected"),
        ("#\n\na.example secret", "line 3: a secret is whsec_"),
        (f"a.example whsec_{'A' * 28}", "24 to 64 bytes"),
        ("a.example whsec_!!!!", "in base64"),
        (f"a.example/path {SECRET}", "a host, host:port"),
        (f"a.example/ {SECRET}", "a host, host:port"),
        (f"ftp://a.example {SECRET}", "a host, host:port"),
        (f"*.example {SECRET}", "a host, host:port"),
        (f"a.example {SECRET}\nA.example:443 {SECRET}", "line 2: https://a.example is listed twice"),
    ],
)
def test_a_line_that_is_wrong(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        read_hosts(text)
    assert SECRET[6:] not in str(caught.value)


def test_tries_go_on_for_a_day_and_then_end() -> None:
    drawn = random.Random(1)
    plan = [delay_us(tries, drawn.random()) for tries in range(1, MAX_TRIES + 1)]
    assert plan.pop() is None
    delays = [delay for delay in plan if delay is not None]
    assert len(delays) == len(plan)
    assert 20 * 3_600e6 < sum(delays) < 25 * 3_600e6
    for tries, delay in enumerate(delays):
        middle = min(5_000_000 * 2**tries, LAST_DELAY_US)
        assert middle * (1 - SPREAD) <= delay <= middle * (1 + SPREAD)
    assert delay_us(MAX_TRIES + 1, 0.5) is None


def test_the_type_of_an_event_and_its_id() -> None:
    keep = {"path": "/v1/responses"}
    work = Work("acme", "r", "m", {}, "d", 7_000_000, keep, "https://a")
    hook = work.hook
    assert hook is not None
    cut = {"choices": [{"finish_reason": "length"}]}
    records = [work.record(9_000_000, outcome) for outcome in ({"choices": []}, cut, EngineError("x"))]
    events = [event_of(hook, record) for record in records]
    types = ["response.completed", "response.incomplete", "response.failed"]
    assert [event["type"] for event in events] == types
    assert len({event["id"] for event in events}) == 1
    assert {key: events[0][key] for key in ("object", "created_at", "data")} == {
        "object": "event", "created_at": 9, "data": {"id": "r"},
    }  # fmt: skip
    others = [
        Hook("https://a", REQUEST, "acme", "r", 7_000_000),
        Hook("https://a", RESPONSE, "bob", "r", 7_000_000),
        Hook("https://a", RESPONSE, "acme", "r2", 7_000_000),
        Hook("https://a", RESPONSE, "acme", "r", 7_000_001),  # the id is used again
    ]
    ids = {event_of(other, records[0])["id"] for other in others}
    assert len(ids | {events[0]["id"]}) == 5
    assert event_of(others[0], records[1])["type"] == "request.completed"
    batch = {"status": "expired", "expired_at": 3}
    event = event_of(Hook("https://a", BATCH, "acme", "batch_1", 1), batch)
    assert (event["type"], event["created_at"]) == ("batch.expired", 3)


def test_work_without_a_webhook_is_stored_as_before() -> None:
    work = Work("acme", "r", "m", {"prompt": "x"}, "d", 7)
    assert work.hook is None
    assert b"webhook" not in work.pack()
    assert b"model_digest" not in work.pack()
