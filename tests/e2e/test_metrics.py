"""Metrics of real processes in a real Prometheus: every expression of the dashboard and of the alerts shows
something under load."""

from __future__ import annotations

import asyncio
import json
import math
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from support.prometheus_process import DOCKER, Prometheus, program
from support.redis_process import RedisProcess
from support.running_up import StartUp, Up, running_up

KINDS = {"gateway", "tokenizer", "scheduler", "executor", "kv_offload", "detokenizer"}
MODEL = "smollm2-135m-instruct"
BLOCKS = 32  # for 512 tokens: a few of the requests below fit, so that others are paused
SLOTS, WAITING = 8, 8
PATIENCE_S = 120  # a guard: two scrapes under load take a second
ON = {"OTEL_METRICS_EXPORTER": "prometheus", "OTEL_EXPORTER_PROMETHEUS_PORT": "0"}


def dashboard_expressions() -> list[str]:
    boards = [json.loads(path.read_text()) for path in (DOCKER / "grafana" / "dashboards").glob("*.json")]
    return [
        target["expr"] for board in boards for panel in board["panels"] for target in panel.get("targets", ())
    ]


def alert_expressions() -> list[str]:
    """What each alert looks at, without the comparison that makes it silent in good times."""
    rules = yaml.safe_load((DOCKER / "prometheus" / "alerts.yml").read_text())["groups"]
    return [watched(rule["expr"]) for group in rules for rule in group["rules"]]


def watched(expression: str) -> str:
    if absent := re.fullmatch(r"absent\((.*)\)", expression, re.DOTALL):
        return absent[1]
    found = re.fullmatch(r"(.*\S)\s*[<>]=?\s*[0-9.]+", expression, re.DOTALL)
    assert found, f"no comparison ends {expression!r}"
    return found[1]


def pages(up: Up) -> dict[str, str]:
    """The URL of each process's page, as `up` prints them."""
    line = next(line for line in up.printed if "metrics:" in line)
    return dict(re.findall(r"(\S+) (http://\S+/metrics)", line))


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with RedisProcess() as redis, running_up(
        tmp_path_factory.mktemp("metrics"), "--kv-blocks", str(BLOCKS), "--slots", str(SLOTS),
        HEADRACE_HTTP="127.0.0.1:0", HEADRACE_SIM="step=1000", HEADRACE_MAX_WAITING=str(WAITING),
        HEADRACE_POLICY="tier=loadtest.policies:swap", HEADRACE_L2=redis.url, HEADRACE_L1="64", **ON,
    ) as running:  # fmt: skip
        yield running


class Load:
    """Rounds of requests: streams whose prompts begin alike, more than fit, one that has no time."""

    def __init__(self, up: Up) -> None:
        limits = httpx.Limits(max_connections=100)
        self._http = httpx.AsyncClient(base_url=up.http_url, timeout=60, limits=limits)
        self._asked = 0

    async def __aenter__(self) -> Load:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def round(self) -> set[int]:
        """The statuses of its answers."""
        many = [self._chat(96, stream=True) for _ in range(SLOTS + 3 * WAITING)]
        return set(await asyncio.gather(*many, self._chat(400, timeout_s=0.001)))

    async def _chat(self, tokens: int, *, stream: bool = False, timeout_s: float = 60) -> int:
        self._asked += 1
        words = f"The same words for all. {'A word of its own: ' * 4}{self._asked % 7}"
        body = {
            "model": MODEL, "messages": [{"role": "user", "content": words}], "max_tokens": tokens,
            "stream": stream, "timeout_s": timeout_s, "ignore_eos": True,
        }  # fmt: skip
        return (await self._http.post("chat/completions", json=body)).status_code


async def test_every_expression_shows_something_under_load(up: Up, tmp_path: Path) -> None:
    addresses = {name: httpx.URL(url).netloc.decode() for name, url in pages(up).items()}
    assert set(addresses) == KINDS
    missing = dict.fromkeys([*dashboard_expressions(), *alert_expressions()])
    assert len(missing) > 60
    statuses: set[int] = set()
    with Prometheus(tmp_path / "prometheus", addresses) as prometheus:
        async with Load(up) as load:
            ends_at = asyncio.get_running_loop().time() + PATIENCE_S
            while missing and asyncio.get_running_loop().time() < ends_at:
                statuses |= await load.round()
                found = {e: await asyncio.to_thread(prometheus.values, e) for e in missing}
                missing = {e: values for e, values in found.items() if not any(map(math.isfinite, values))}
        assert missing == {}
        assert statuses >= {200, 429, 504}
        alerts = prometheus.get("rules")["groups"][0]["rules"]
    assert [(rule["name"], rule["health"]) for rule in alerts if rule["health"] != "ok"] == []
    assert len(alerts) == len(alert_expressions())


def test_promtool_finds_nothing() -> None:
    for what, path in (("config", "prometheus.yml"), ("rules", "alerts.yml")):
        done = subprocess.run(
            [program("promtool"), "check", what, str(DOCKER / "prometheus" / path)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_metrics_page_is_clean_and_shows_that_its_process_is_ready(up: Up) -> None:
    for url in pages(up).values():
        while "headrace_ready 1.0" not in (answer := httpx.get(url, timeout=120)).text.splitlines():
            time.sleep(0.05)  # kv_offload starts after the others
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = answer.text.splitlines()
        (memory,) = (line for line in lines if line.startswith("process_resident_memory_bytes "))
        assert float(memory.split()[1]) > 1e6
        names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
        assert len(names) == len(set(names))


def test_the_gateway_has_the_metrics_of_all_services_on_one_page(up: Up) -> None:
    def families(text: str) -> set[str]:
        return {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}

    apart = {name: families(httpx.get(url, timeout=120).text) for name, url in pages(up).items()}
    page = httpx.get(httpx.URL(up.http_url).join("/metrics"), timeout=120).text
    assert set().union(*apart.values()) <= families(page)
    living = {line for line in page.splitlines() if line.startswith("headrace_up{")}
    assert {line.partition('service="')[2].partition('"')[0] for line in living} == KINDS
    assert all(line.endswith(" 1.0") for line in living)
    samples = [line for line in page.splitlines() if not line.startswith("#")]
    assert [line for line in samples if 'service="' not in line or 'instance="' not in line] == []


def test_other_paths_of_the_metrics_port_are_refused(up: Up) -> None:
    url = pages(up)["tokenizer"]
    assert httpx.get(url.replace("/metrics", "/"), timeout=120).status_code == 404
    assert httpx.post(url, timeout=120).status_code == 405
    assert (httpx.head(url, timeout=120).status_code, httpx.head(url, timeout=30).content) == (200, b"")


def test_taken_metrics_port_is_an_error_before_any_service_starts(up: Up, start_up: StartUp) -> None:
    port = pages(up)["gateway"].rsplit(":", 1)[1].removesuffix("/metrics")
    other = start_up(wait=False, **{**ON, "OTEL_EXPORTER_PROMETHEUS_PORT": port})
    assert other.process.wait(60) == 1
    output = other.log.read_text()
    assert f"metrics cannot listen on 127.0.0.1:{port} (Address already in use)" in output
    assert "set OTEL_EXPORTER_PROMETHEUS_PORT to another" in output
