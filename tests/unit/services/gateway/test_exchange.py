"""What surrounds a request at the gateway: errors, keys, ids, spans, figures, the page for Prometheus."""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path

import pytest

from services.gateway.exchange import (
    MAX_IGNORED,
    Exchange,
    ExchangeCounters,
    NotAuthorized,
    SlowRequest,
    fresh_id,
    given_id,
    headers_of,
    headers_of_exchange,
    spans,
)
from services.gateway.visitors import Keys, read_keys
from shared.client.client import SlowReader
from shared.errors import (
    BadRequest,
    DeadlineExceeded,
    EngineError,
    Forbidden,
    HeadraceError,
    Overloaded,
    PayloadTooLarge,
    SetupError,
    Unavailable,
    UnknownModel,
)
from shared.openai.call import error_body, error_status
from shared.telemetry.counters import HistogramPoint, MetricPoint
from shared.telemetry.metrics import to_prometheus
from shared.telemetry.traces import covered_us


@pytest.mark.parametrize(
    ("error", "status", "kind", "word"),
    [
        (BadRequest("w", param="n"), 400, "invalid_request_error", None),
        (BadRequest("context_length_exceeded: w"), 400, "invalid_request_error", "context_length_exceeded"),
        (NotAuthorized("w"), 401, "authentication_error", "invalid_api_key"),
        (UnknownModel("w", param="model"), 404, "invalid_request_error", "model_not_found"),
        (PayloadTooLarge("w"), 413, "invalid_request_error", "payload_too_large"),
        (SlowRequest("w"), 408, "invalid_request_error", "request_timeout"),
        (Overloaded("w", retry_after_ms=1500), 429, "rate_limit_error", "overloaded"),
        (EngineError("w"), 500, "server_error", "engine_error"),
        (Unavailable("w"), 503, "server_error", "unavailable"),
        (DeadlineExceeded("w"), 504, "server_error", "timeout"),
    ],
)
def test_errors_have_openais_form(error: HeadraceError, status: int, kind: str, word: str | None) -> None:
    assert error_status(error) == status
    assert error_body(error, "r") == {
        "error": {
            "message": error.message,
            "type": kind,
            "param": error.param,
            "code": word,
            "request_id": "r",
        }
    }


def test_error_headers_have_the_time_to_retry() -> None:
    assert headers_of(Overloaded("w", retry_after_ms=1500)) == {"Retry-After": "2", "Retry-After-Ms": "1500"}
    assert headers_of(Unavailable("w")) == {"Retry-After": "1", "Retry-After-Ms": "1000"}
    assert headers_of(NotAuthorized("w")) == {"WWW-Authenticate": "Bearer"}
    assert headers_of(BadRequest("w")) == {}


def test_open_exchanges_are_counted_by_tenant() -> None:
    meter = ExchangeCounters()
    visits = [Exchange(method="POST", route="/r", request_id=n, tenant=n[0]) for n in ("a1", "a2", "b1")]
    for visit in visits:
        meter.begin()
        meter.enter(visit)
    looks = Exchange(method="GET", route="/v1/models", request_id="x", tenant="a")
    meter.begin()
    meter.end(looks)
    meter.end(visits[2])
    assert (meter.active, meter.open) == (2, {"a": 2})


# ---- keys -------------------------------------------------------------------------------------------

HASH = sha256(b"secret").hexdigest()


def test_keys_are_plain_or_hashed() -> None:
    text = f"# names\nacme  hr-1 # first\n\nacme hr-2\nother sha256:{HASH}\n"
    assert read_keys(text) == {
        sha256(b"hr-1").hexdigest(): "acme",
        sha256(b"hr-2").hexdigest(): "acme",
        HASH: "other",
    }


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("acme", "line 1: `tenant key` is expected"),
        ("a b\nacme k 3", "line 2: `tenant key` is expected"),
        (f"{'a' * 129} k", "line 1: `tenant key` is expected"),
        ("a sha256:12", "line 1: sha256: and 64 hex digits are expected"),
        ("a k\nb k", "line 2: this key is another tenant's, too"),
    ],
)
def test_a_bad_line_is_named(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_keys(text)


def test_keys_admit_their_tenants_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"acme hr-1\nother sha256:{HASH}\n")
    keys = Keys(str(path))
    assert keys.tenant_of("Bearer hr-1") == "acme"
    assert keys.tenant_of("bearer  secret ") == "other"
    for header in ("", "Bearer", "Bearer ", "Basic hr-1", "hr-1", "Bearer hr-2", f"Bearer {HASH}"):
        with pytest.raises(NotAuthorized):
            keys.tenant_of(header)
    assert Keys("").tenant_of("") == "public"


def test_pages_about_all_tenants_are_for_the_operator(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("acme hr-1\nheadrace-operator hr-2\n")
    keys = Keys(str(path))
    keys.only_operator("Bearer hr-2")
    assert keys.tenant_of("Bearer hr-2") == "public"  # as the operator's command line asks
    with pytest.raises(Forbidden, match="send the key of headrace-operator in http_keys"):
        keys.only_operator("Bearer hr-1")
    for header in ("", "Bearer junk"):
        with pytest.raises(NotAuthorized):
            keys.only_operator(header)
    Keys("").only_operator("")


def test_keys_change_while_running(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys"
    path.write_text("acme one\n")
    keys = Keys(str(path))
    path.write_text("acme three\n")
    os.utime(path, ns=(1, 1))
    keys.refresh()
    assert keys.tenant_of("Bearer three") == "acme"
    with pytest.raises(NotAuthorized):
        keys.tenant_of("Bearer one")
    path.write_text("nonsense\n")
    os.utime(path, ns=(2, 2))
    keys.refresh()
    keys.refresh()
    path.unlink()
    keys.refresh()
    assert keys.tenant_of("Bearer three") == "acme"
    assert [r.message.count("those before remain") for r in caplog.records] == [1, 1]


def test_replaced_key_file_is_read_at_any_size_and_time(tmp_path: Path) -> None:
    path, new = tmp_path / "keys", tmp_path / "new"
    path.write_text("acme one\n")
    keys = Keys(str(path))
    new.write_text("acme two\n")
    facts = path.stat()
    os.utime(new, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    new.replace(path)
    keys.refresh()
    assert keys.tenant_of("Bearer two") == "acme"
    with pytest.raises(NotAuthorized):
        keys.tenant_of("Bearer one")


def test_unreadable_key_file_is_tried_again_and_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    path.write_text("acme one\n")
    keys = Keys(str(path))
    path.write_text("acme second\n")
    with monkeypatch.context() as full:

        def refused(_: Path) -> str:
            raise OSError(24, "Too many open files")

        full.setattr(Path, "read_text", refused)
        for _ in range(3):
            keys.refresh()
    assert keys.tenant_of("Bearer one") == "acme"
    keys.refresh()
    assert keys.tenant_of("Bearer second") == "acme"
    path.unlink()
    for _ in range(3):
        keys.refresh()
    assert [r.message.partition("remain: ")[2][:10] for r in caplog.records] == ["[Errno 24]", "[Errno 2] "]


def test_a_keys_file_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"http_keys: .*No such file"):
        Keys(str(tmp_path / "none"))


# ---- ids, spans, figures ----------------------------------------------------------------------------


def test_ids_of_clients_are_kept_where_they_can_be() -> None:
    assert given_id("a-b:c.1") == "a-b:c.1"
    for header in ("", "a b", "x" * 129, "é"):
        assert given_id(header) == ""


@pytest.mark.parametrize("given", ["", "mesh-1", "x" * 128])
def test_requests_with_one_given_id_have_ids_of_their_own(given: str) -> None:
    """A mesh gives one id to all calls that belong together, at the same time."""
    made = {fresh_id(given) for _ in range(100)}
    assert len(made) == 100
    assert all(name.startswith(given[:96]) for name in made)
    assert all(given_id(f"{name}:63") for name in made), "and have room for the number of a prompt"


def visit(**more: object) -> Exchange:
    facts: dict[str, object] = {
        "method": "POST",
        "route": "/v1/completions",
        "request_id": "r",
        "started_us": 1_000,
    }
    return Exchange(**{**facts, "ended_us": 9_000, "status": 200, **more})  # type: ignore[arg-type]  # a table of them


def test_the_spans_of_a_request_surround_the_native_ones() -> None:
    root, receive, respond = spans(visit(requested_us=1_500, answered_us=8_800, tenant="acme"), "gateway.1")
    assert (root.name, root.kind, root.parent, root.error) == ("POST /v1/completions", "server", None, "")
    assert root.attributes == {
        "component": "gateway.1",
        "request.id": "r",
        "tenant": "acme",
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
    }
    assert (receive.name, receive.start_us, receive.end_us) == ("receive", 1_000, 1_500)
    assert (respond.name, respond.start_us, respond.end_us) == ("respond", 8_800, 9_000)
    native = (1_500, 8_800)
    assert covered_us([native, *((s.start_us, s.end_us) for s in (receive, respond))]) == root.took_us


def test_failed_request_sets_the_error_on_its_span() -> None:
    root, receive, respond = spans(visit(status=429, error=Overloaded("full")), "g")
    assert (root.error, root.attributes["error.type"]) == ("full", "overloaded")
    assert (receive.took_us, respond.took_us) == (8_000, 0)


def test_exchange_counters_count_requests_errors_and_first_bytes() -> None:
    meter = ExchangeCounters()
    for done in (visit(first_us=3_000), visit(status=429), visit(error=SlowReader("s"))):
        meter.begin()
        meter.end(done)
    meter.begin()
    page = to_prometheus(meter.metrics()).decode().splitlines()
    assert meter.requests == 3
    labels = 'http_response_status_code="200",http_route="/v1/completions"'
    for line in (
        "http_server_active_requests 1.0",
        "headrace_gateway_slow_readers_total 1.0",
        f'http_server_request_duration_seconds_bucket{{{labels},le="0.005"}} 0.0',
        f'http_server_request_duration_seconds_bucket{{{labels},le="0.01"}} 2.0',
        f'http_server_request_duration_seconds_bucket{{{labels},le="+Inf"}} 2.0',
        f"http_server_request_duration_seconds_sum{{{labels}}} 0.016",
        f"http_server_request_duration_seconds_count{{{labels}}} 2.0",
        'headrace_gateway_time_to_first_chunk_seconds_count{http_route="/v1/completions"} 1.0',
    ):
        assert line in page


def test_prometheus_page_has_this_text() -> None:
    readings = [
        MetricPoint("a.b", 1.5, "By", (("x.y", 'see "hi"\n\\'),)),
        MetricPoint("c", 3, "{request}", is_counter=True),
        MetricPoint("a.b", 2, "By"),
        HistogramPoint("h", (0.5, 1), (1, 0, 2), 7.25, "s"),
    ]
    assert to_prometheus(readings).decode() == (
        "# HELP a_b_bytes a.b, By\n# TYPE a_b_bytes gauge\n"
        'a_b_bytes{x_y="see \\"hi\\"\\n\\\\"} 1.5\n'
        "a_b_bytes 2.0\n"
        "# HELP c_total c, {request}\n# TYPE c_total counter\n"
        "c_total 3.0\n"
        "# HELP h_seconds h, s\n# TYPE h_seconds histogram\n"
        'h_seconds_bucket{le="0.5"} 1.0\n'
        'h_seconds_bucket{le="1"} 1.0\n'
        'h_seconds_bucket{le="+Inf"} 3.0\n'
        "h_seconds_sum 7.25\n"
        "h_seconds_count 3.0\n"
    )
    from prometheus_client.parser import text_string_to_metric_families

    families = list(text_string_to_metric_families(to_prometheus(readings).decode()))
    assert [(f.name, f.type) for f in families] == [
        ("a_b_bytes", "gauge"),
        ("c", "counter"),
        ("h_seconds", "histogram"),
    ]


def test_the_header_of_ignored_fields_holds_any_name() -> None:
    def named(*names: str) -> str | None:
        exchange = Exchange(method="POST", route="/api/chat", request_id="r", ignored=names)
        return headers_of_exchange(exchange).get("headrace-ignored")

    assert named() is None
    assert named("options.tfs_z", "logit_bias") == "options.tfs_z, logit_bias"
    assert named("a\r\nSet-Cookie: b", "größe", "c, d") == r"'a\r\nSet-Cookie: b', 'gr\xf6\xdfe', 'c, d'"
    assert len(named(*["\U0001f600" * 99] * 99) or "") <= MAX_IGNORED * 66
