"""Which requests of browsers a gateway takes."""

from __future__ import annotations

import socket

import pytest

from services.gateway.visitors import Visitors


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:8000", "[::1]:8000", "192.168.1.7", "10.0.0.3:80", "localhost:8000", "LOCALHOST",
        "a.localhost",
        "gateway:8000", "headrace-gateway", "gateway.ns.svc:8000", "gateway.ns.svc.cluster.local",
        "nas.local", "box.lan", "vm.internal", socket.gethostname(), "",
    ],
)  # fmt: skip
def test_a_host_that_no_other_site_can_have_is_taken(host: str) -> None:
    assert Visitors().refusal("GET", {"host": host}) is None
    assert Visitors().refusal("POST", {"host": host}) is None


@pytest.mark.parametrize(
    "host", ["evil.example:8000", "localhost.evil.example", "127.0.0.1.nip.io", "alocal.com"]
)
def test_a_name_that_another_site_may_own_is_refused_unless_it_is_configured(host: str) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        refused = Visitors().refusal(method, {"host": host})
        assert refused is not None
        assert "http_cors" in refused.message
    name = host.partition(":")[0]
    for origin in (f"https://{name}", f"http://{name.upper()}:8000", "*"):
        assert Visitors([origin]).refusal("GET", {"host": host}) is None
    assert Visitors(keys=True).refusal("GET", {"host": host}) is None, "a page has no key"


@pytest.mark.parametrize(
    ("headers", "taken"),
    [
        ({}, True),  # no browser
        ({"origin": "http://localhost:8000"}, True),
        ({"origin": "http://localhost:3000"}, False),
        ({"origin": "https://evil.example"}, False),
        ({"origin": "null"}, False),
        ({"origin": "https://chat.example"}, True),  # in http_cors
        ({"origin": "https://llm.example", "sec-fetch-site": "same-origin"}, True),  # with a proxy before it
        ({"origin": "https://llm.example", "sec-fetch-site": "same-site"}, False),
        ({"origin": "chrome-extension://abc"}, True),
        ({"origin": "app://obsidian.md"}, True),
    ],
)
def test_another_origin_changes_nothing(headers: dict[str, str], taken: bool) -> None:
    visitors, to = Visitors(["https://chat.example"]), {"host": "localhost:8000"}
    for method in ("POST", "DELETE"):
        refused = visitors.refusal(method, {**to, **headers})
        assert (refused is None) == taken
        assert refused is None or "http_cors" in refused.message
    assert visitors.refusal("GET", {**to, **headers}) is None
    assert Visitors(["*"]).refusal("POST", {**to, **headers}) is None
    assert Visitors(keys=True).refusal("POST", {**to, **headers}) is None
