"""By hand: the page of the gateway in headless Chromium, with keys and without, and a picture of it.

    python -m venv VENV && VENV/bin/pip install playwright
    apt-get install --no-install-recommends chromium
    python scripts/page_check.py VENV            # writes docs/images/page.png

A person asks in the chat while many other requests run, so that some are paused: the answer appears, the list
has the request, its waterfall is drawn, the pause is explained in words. A tenant's key shows no fleet. No
request of the page leaves the gateway, and the browser's console has no error. /docs shows every operation
and sends a chat.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[1]
CHROMIUM = "/usr/bin/chromium"
READY_S = 120
BROWSE = """
import json, re, sys
from playwright.sync_api import sync_playwright
url, chromium, picture, key, paused = sys.argv[1:]
with sync_playwright() as p:
    browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
    page = browser.new_page(viewport={"width": 1360, "height": 1180})
    errors, hosts = [], set()
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
    page.goto(url + (f"/#key={key}" if key else "/"))
    page.locator("#model option").first.wait_for(state="attached")
    page.get_by_label("message").fill("What is the capital of France?")
    page.get_by_role("button", name="Send").click()
    page.locator(".message.assistant", has_text=re.compile(r"\\w")).wait_for(timeout=120_000)
    page.locator("#send:enabled").wait_for(timeout=120_000)
    if paused:
        page.locator("#recent tr", has_text=paused).click()
        page.get_by_text("Paused: the KV cache was full").first.wait_for()
    else:
        page.locator("#recent tr").first.click()
    page.locator("#trace .span").first.wait_for()
    page.wait_for_timeout(2500)
    if picture:
        page.screenshot(path=picture, full_page=True)
    seen = {
        "answer": page.locator(".message.assistant").inner_text(),
        "health": page.locator("#health").inner_text(),
        "services": page.locator("#services tr").count(), "problems": page.locator("#problems").inner_text(),
        "requests": page.locator("#recent tr").count(), "spans": page.locator("#trace .span").count(),
        "words": page.locator("#trace li").all_inner_texts(), "tiers": page.locator("#tiers .bar").count(),
        "in_address": "key" in page.url,
    }
    page.goto(url + "/docs")
    chat = page.locator("#operations details", has_text="POST /v1/chat/completions")
    chat.locator("summary").click()
    chat.get_by_role("button", name="Send").click()
    chat.locator("pre", has_text="chat.completion").wait_for(timeout=120_000)
    operations, fields = page.locator("#operations details").count(), chat.locator("tr").count()
    print(json.dumps({
        **seen, "operations": operations, "fields": fields, "hosts": sorted(hosts), "errors": errors,
    }))
    browser.close()
"""


def browse(venv: Path, url: str, picture: str = "", key: str = "", paused: str = "") -> dict[str, object]:
    """What a person sees after one question."""
    command = [venv / "bin" / "python", "-c", BROWSE, url, CHROMIUM, picture, key, paused]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, object] = json.loads(done.stdout)
    return found


async def load(url: str) -> str:
    """Send more requests than the KV blocks hold; the id of one that was paused."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:

        async def one(number: int) -> str:
            body = {
                "messages": [{"role": "user", "content": f"Write a long story about the number {number}."}],
                "max_tokens": 120, "ignore_eos": True,
            }  # fmt: skip
            return str((await http.post("/v1/chat/completions", json=body)).json()["id"])

        for name in await asyncio.gather(*map(one, range(12))):
            events = (await http.get(f"/requests/{name}")).json()["spans"][0]["events"]
            if "preempt" in {event["name"] for event in events}:
                return name
    raise SystemExit("no request was paused")


def up(folder: Path, *flags: str) -> tuple[subprocess.Popen[str], str]:
    """A ready `headrace up`, and its URL."""
    command = [sys.executable, "-m", "services.launcher.cli", "up", "--http", "127.0.0.1:0", *flags]
    env = {**os.environ, "XDG_STATE_HOME": str(folder)}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "OpenAI API" in line:
            return process, line.split()[-1].removesuffix("/v1")
    raise SystemExit("up ended")


def main() -> None:
    """Check both, and write the picture."""
    venv = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        process, url = up(folder, "--kv-blocks", "40", "--slots", "8", "--fleet", "page")
        try:
            seen = browse(
                venv, url, str(ROOT / "docs" / "images" / "page.png"), paused=asyncio.run(load(url))
            )
            described = httpx.get(f"{url}/openapi.json").json()["paths"]
        finally:
            process.terminate()
            process.wait(60)
        print(json.dumps(seen, indent=2))
        assert seen["health"] == "ready"
        assert "Paris" in str(seen["answer"])
        assert (seen["problems"], seen["errors"], seen["hosts"]) == ("", [], [url.split("/")[2]])
        assert seen["services"] == 8
        assert seen["operations"] == sum(len({"get", "post"} & {*each}) for each in described.values())
        assert int(str(seen["fields"])) > 50
        assert seen["tiers"] == 2
        auth = [
            sys.executable,
            "-m",
            "services.launcher.cli",
            "auth",
            str(folder / "auth"),
            "--tenant",
            "acme",
        ]
        subprocess.run([*auth, "--fleet", "page"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        process, url = up(folder, "--auth", str(folder / "auth"), "--fleet", "page")
        try:
            key = (folder / "auth" / "tenants" / "acme" / "api_key").read_text().strip()
            seen = browse(venv, url, key=key)
        finally:
            process.terminate()
            process.wait(60)
        print(json.dumps(seen, indent=2))
        assert "Paris" in str(seen["answer"])
        assert (seen["requests"], seen["services"], seen["in_address"]) == (1, 0, False)
        assert "operator" in str(seen["problems"])


if __name__ == "__main__":
    main()
