"""By hand: a real request's trace in Arize Phoenix, asserted over its REST API, and a picture of it.

    python -m venv VENV && VENV/bin/pip install arize-phoenix==20.26.1 playwright     # 0.9 GB
    apt-get install --no-install-recommends chromium
    python scripts/phoenix_trace.py VENV            # writes docs/images/phoenix_trace.png

    headrace up ──OTLP──▶ tee ──the same bytes──▶ Phoenix ──REST──▶ every span and its parent
                           └─ what Phoenix drops: service.name, links

Several requests at once, more than the KV blocks hold: one that was paused and resumed is looked at.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from support.otlp_receiver import Received, Receiver  # noqa: E402 - run as a script from anywhere

WAIT_S = 400  # a guard against a hang
REQUESTS = 8
EDGE = "POST /v1/chat/completions"
REQUEST = "chat smollm2-135m-instruct"
PARENTS = {  # of every stage; a pause is below the prefill or the request, as it came
    EDGE: {""}, "receive": {EDGE}, REQUEST: {EDGE}, "respond": {EDGE},
    "received": {REQUEST}, "tokenize": {REQUEST}, "transit": {REQUEST}, "queue": {REQUEST},
    "prefill": {REQUEST}, "prefill chunk 1": {"prefill"}, "first token": {REQUEST}, "decode": {REQUEST},
    "pause": {REQUEST, "prefill"}, "restore": {REQUEST, "prefill"},
    "detokenize": {REQUEST}, "send": {REQUEST},
}  # fmt: skip
MAYBE = {"restore"}  # where computing again is quicker, nothing is brought
SERVICES = {f"headrace-{kind}" for kind in ("gateway", "tokenizer", "scheduler", "executor", "detokenizer")}
SHOOT = """
import sys
from playwright.sync_api import sync_playwright
with sync_playwright() as p:
    browser = p.chromium.launch(executable_path=sys.argv[3], args=["--no-sandbox"])
    page = browser.new_page(viewport={"width": 1500, "height": 1180}, device_scale_factor=1)
    page.goto(sys.argv[1])
    page.get_by_text("prefill chunk 1", exact=True).first.wait_for(timeout=120_000)
    page.get_by_text("chat smollm2-135m-instruct").first.click()
    page.get_by_role("tab", name="Attributes").first.click(timeout=120_000)
    page.get_by_text("request.id").first.wait_for(timeout=120_000)
    page.wait_for_load_state("networkidle")
    page.screenshot(path=sys.argv[2])
    browser.close()
"""


class Tee(Receiver):
    """Keeps the spans as they came, and passes the bytes on."""

    def __init__(self, onward: str) -> None:
        super().__init__()
        self._onward = onward
        self._http = httpx.Client(timeout=WAIT_S)

    def take(self, body: bytes) -> None:
        """On a thread for each exporter."""
        self._http.post(
            self._onward, content=body, headers={"Content-Type": "application/x-protobuf"}
        ).raise_for_status()
        super().take(body)


@contextmanager
def running(argv: Sequence[str], ready: str, **env: str) -> Iterator[list[str]]:
    """A process from the line that says `ready` on; the lines so far. Its output is read to the end."""
    process = subprocess.Popen(
        argv, env={**os.environ, **env}, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    guard = threading.Timer(WAIT_S, process.kill)
    guard.start()
    lines: list[str] = []
    try:
        for line in process.stdout:
            lines.append(line.rstrip())
            if ready in line:
                break
        else:
            raise SystemExit(f"{argv[0]} ended before it was ready:\n" + "\n".join(lines[-20:]))
        guard.cancel()
        threading.Thread(target=lines.extend, args=(process.stdout,), daemon=True).start()
        yield lines
    finally:
        guard.cancel()
        process.terminate()
        process.wait(WAIT_S)


async def ask(url: str) -> None:
    """The requests, all at once, streamed to their ends."""
    async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as http:

        async def one(number: int) -> None:
            question = f"{number}. Tell me a story about the sea, a ship and its captain. " * 4
            body = {
                "messages": [{"role": "user", "content": question}],
                "max_tokens": 96, "stream": True, "ignore_eos": True,
            }  # fmt: skip
            answer = await http.post(
                "chat/completions", json=body, headers={"x-request-id": f"story-{number}"}
            )
            assert "[DONE]" in answer.text, answer.text[-500:]

        await asyncio.gather(*map(one, range(REQUESTS)))


def chosen(tee: Tee) -> list[Received]:
    """The spans of a request that was paused, once all of them have come; rather of one that was restored."""
    roots = tee.wait_for([f"story-{number}" for number in range(REQUESTS)], WAIT_S)
    spans = list(tee.spans)
    traces = [[span for span in spans if span.trace_id == root.trace_id] for root in roots.values()]
    for wanted in ({"restore", "pause", EDGE}, {"pause", EDGE}):
        for trace in traces:
            if wanted <= {span.name for span in trace}:
                return trace
    raise SystemExit("no request was paused: give it fewer --kv-blocks")


def spans_in(phoenix: str, project: str, trace: str, count: int) -> list[dict[str, Any]]:
    """The spans of a trace as Phoenix has stored them, once there are `count`."""
    with httpx.Client(base_url=phoenix, timeout=WAIT_S) as http:
        for _ in range(WAIT_S):
            found, cursor = [], ""
            while True:
                query = {"limit": 500, "trace_id": trace, **({"cursor": cursor} if cursor else {})}
                page = http.get(f"/v1/projects/{project}/spans", params=query).raise_for_status().json()
                found += [span for span in page["data"] if span["context"]["trace_id"] == trace]
                if not (cursor := page.get("next_cursor") or ""):
                    break
            if len(found) >= count:
                return found
            threading.Event().wait(1)
    raise SystemExit(f"Phoenix has {len(found)} of the {count} spans of {trace}")


def check(sent: list[Received], stored: list[dict[str, Any]], all_spans: list[Received]) -> None:
    """Every stage and its parent in Phoenix; from the bytes what it drops."""
    name_of = {span["context"]["span_id"]: span["name"] for span in stored}
    parents: dict[str, set[str]] = {}
    for span in stored:
        parent = span["parent_id"] or ""
        parents.setdefault(span["name"], set()).add(name_of[parent] if parent else "")
    wrong = {
        name: parents.get(name) for name, allowed in PARENTS.items() if parents.get(name, set()) - allowed
    }
    assert (wrong, set(PARENTS) - set(parents) - MAYBE) == ({}, set())
    assert {(s["context"]["span_id"], s["name"], s["parent_id"] or "") for s in stored} == {
        (s.span_id, s.name, s.parent_id) for s in sent
    }
    root = next(span for span in sent if span.name == REQUEST)
    (shown,) = (span for span in stored if span["name"] == REQUEST)
    assert [event["name"] for event in shown["events"]] == [name for name, _, _ in root.events]
    assert {"admit", "pause"} <= {event["name"] for event in shown["events"]}
    assert {span.resource["service.name"] for span in all_spans} == SERVICES
    batches = {span.attributes["batch.id"] for span in sent if "chunk" in span.name}
    steps = [span for span in all_spans if span.attributes.get("batch.id") in batches and span.links]
    assert any((root.trace_id, root.span_id) in step.links for step in steps), "no step names the request"


def main() -> None:
    """Start Phoenix and a fleet, ask, look, take the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("venv", type=Path, help="where Phoenix and Playwright are installed")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--port", type=int, default=6006, help="of Phoenix")
    parser.add_argument("--kv-blocks", default="48")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "phoenix_trace.png")
    given = parser.parse_args()
    phoenix = f"http://127.0.0.1:{given.port}"
    with tempfile.TemporaryDirectory() as folder:
        serve = [str(given.venv / "bin" / "phoenix"), "serve"]
        own = {"PHOENIX_PORT": str(given.port), "PHOENIX_HOST": "127.0.0.1", "PHOENIX_WORKING_DIR": folder}
        own |= {"PHOENIX_GRPC_PORT": str(given.port + 1), "PHOENIX_TELEMETRY_ENABLED": "false"}
        with running(serve, "Uvicorn running on", **own):
            show(given, phoenix, folder)


def show(given: argparse.Namespace, phoenix: str, folder: str) -> None:
    """The part with Phoenix there."""
    tee = Tee(f"{phoenix}/v1/traces")
    up = [sys.executable, "-m", "services.launcher.cli", "up", "--kv-blocks", given.kv_blocks]
    env = {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{tee.url}/v1/traces", "XDG_RUNTIME_DIR": folder,
        "XDG_STATE_HOME": folder, "HEADRACE_HTTP": "127.0.0.1:0", "HEADRACE_L1": "256",
        "HEADRACE_STEP_TOKENS": "128", "HEADRACE_POLICY": "tier=loadtest.policies:swap",
    }  # fmt: skip
    with running(up, "ready after", **env) as lines:
        url = next(line.split()[-1] for line in lines if "OpenAI API:" in line)
        asyncio.run(ask(url))
        sent = chosen(tee)
    sent = [span for span in tee.spans if span.trace_id == sent[0].trace_id]  # all: the fleet has ended
    trace = sent[0].trace_id
    projects = httpx.get(f"{phoenix}/v1/projects").raise_for_status().json()["data"]
    project = next(p["id"] for p in projects if p["name"] == "default")
    check(sent, spans_in(phoenix, project, trace, len(sent)), list(tee.spans))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    page = f"{phoenix}/projects/{project}/traces/{trace}"
    subprocess.run(
        [str(given.venv / "bin" / "python"), "-c", SHOOT, page, str(given.out), given.chromium], check=True
    )
    print(f"{len(sent)} spans of trace {trace} in Phoenix, each under its parent; picture in {given.out}")
    tee.stop()


if __name__ == "__main__":
    main()
