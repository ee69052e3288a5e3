"""More than one scheduler in a fleet: a second one for a model stands by, and two models have one each."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from support.running_up import HEADRACE, StartUp, Up, running_up, wait_until_gone
from support.text_models import write_bpe_gguf

from loadtest import faults
from loadtest.clients import Clients, mixed
from shared.client.client import request_all
from shared.nats import subjects
from shared.nats.bus import NatsBus

MODEL = "smollm2-135m-instruct"
REQUESTS, CLIENTS = 72, 24
STEADY = {"HEADRACE_SIM": "step=5000,token=20", "HEADRACE_HEARTBEAT_INTERVAL_MS": "500"}
DEADLINE_S = 60
ALIAS = "gpt-4o"


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A fleet of one model with two names."""
    names = ("--model-name", f"{MODEL}, {ALIAS}")
    with running_up(tmp_path_factory.mktemp("one"), *names, HEADRACE_HTTP="127.0.0.1:0", **STEADY) as up:
        yield up


@contextmanager
def second_scheduler(up: Up) -> Iterator[subprocess.Popen[bytes]]:
    """One that is no child of `up`, so that nothing is started in its place."""
    env = {**up.env, "HEADRACE_NATS_URL": up.nats_url, "HEADRACE_MODEL_NAME": f"{MODEL},{ALIAS}"}
    process = subprocess.Popen([*HEADRACE, "serve", "scheduler"], env=env, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


async def schedulers(bus: NatsBus, count: int) -> dict[str, int]:
    """The executors that each of `count` ready schedulers has, by its id."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            found = await request_all(bus, subjects.STATUS, 0.3)
            ready = [s for s in found if s["kind"] == "scheduler" and s["state"] == "ready"]
            if len(ready) == count and any(s["executors"] for s in ready):
                return {str(s["id"]): len(s["executors"]) for s in ready}


async def through(up: Up, fault: signal.Signals | None) -> Counter[str]:
    """How the requests of 24 clients ended, with the first scheduler killed or stopped in their middle."""
    bus = await NatsBus.connect(up.nats_url, timeout_s=30)
    assert sorted((await schedulers(bus, 2)).values()) == [0, 1]
    clients, middle = Clients(up.nats_url, "", DEADLINE_S), asyncio.Event()
    clients.on_end = lambda _: middle.set() if len(clients.ended) >= CLIENTS else None
    running = asyncio.create_task(clients.run(mixed(random.Random(4), REQUESTS, MODEL), 0, CLIENTS))
    await middle.wait()
    (victim,) = faults.pids_of(up.process.pid, "scheduler")
    if fault is not None:
        os.kill(victim, fault)
    await running
    if fault == signal.SIGSTOP:  # back, it knows that its executor has gone
        os.kill(victim, signal.SIGCONT)
        assert sorted((await schedulers(bus, 2)).values()) == [0, 1]
        await clients.run(mixed(random.Random(5), CLIENTS, MODEL), 0, CLIENTS)
    await bus.drain()
    return Counter(f"{o.end} {o.code} {o.message}".strip() for o in clients.outcomes)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_a_standby_costs_no_request_and_takes_over(one: Up, fault: signal.Signals) -> None:
    with second_scheduler(one):
        if fault == signal.SIGKILL:  # of the two, the faster
            assert asyncio.run(through(one, None)) == {"answer 0": REQUESTS}
        ends = asyncio.run(through(one, fault))
    assert ends == {"answer 0": REQUESTS + (CLIENTS if fault == signal.SIGSTOP else 0)}


def ask(http: httpx.Client, model: str, prompt: str = "Hello") -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "seed": 3, "ignore_eos": True}
    return http.post("/completions", json=body)


@dataclass
class TwoModels:
    """A fleet of two models, and the file of the second, tiny."""

    up: Up
    second: Path


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoModels]:
    folder = tmp_path_factory.mktemp("both")
    second = write_bpe_gguf(folder / "tiny.gguf")
    with running_up(folder, "--model", MODEL, "--model", str(second), HEADRACE_HTTP="127.0.0.1:0") as up:
        yield TwoModels(up, second)
        children = up.children()
        assert up.stop(signal.SIGTERM) == 0
        wait_until_gone(children)


@pytest.mark.timeout(180)
def test_two_models_in_one_fleet(start_up: StartUp, both: TwoModels) -> None:
    alone = start_up("--model", str(both.second), HEADRACE_HTTP="127.0.0.1:0")
    with httpx.Client(base_url=alone.http_url, timeout=60) as http:
        wanted = {prompt: ask(http, "tiny", prompt).json()["choices"][0]["text"] for prompt in "abcdefgh"}
    alone.stop(signal.SIGTERM)
    up = both.up
    children = up.children()
    assert len(children) == 4 + 2 * 4  # nats-server, fork server, gateway, kv_offload; four a model
    assert [line.split()[-1] for line in up.printed if "model:" in line] == [MODEL, "tiny"]
    with httpx.Client(base_url=up.http_url, timeout=60) as http:
        listed = http.get("/models").json()["data"]
        assert [entry["id"] for entry in listed] == [MODEL, "tiny"]
        for prompt, text in wanted.items():
            assert ask(http, MODEL, prompt).status_code == 200
            answer = ask(http, "tiny", prompt)
            assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, text)
        health = http.base_url.copy_with(path="/health")
        assert http.get(health).json() == {"status": "ok"}
        unknown = ask(http, "absent")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.timeout(180)
def test_one_model_has_several_names(one: Up) -> None:
    """A service with one of them for another model does not start."""
    assert [line.split()[-1] for line in one.printed if "aliases:" in line] == [ALIAS]
    with httpx.Client(base_url=one.http_url, timeout=60) as http:
        texts = {name: ask(http, name).json()["choices"][0]["text"] for name in (MODEL, ALIAS)}
    assert texts[ALIAS] == texts[MODEL]
    assert one.run("chat", "--model-name", ALIAS, "-q", "Hi", "--max-tokens", "3").returncode == 0
    env = {**one.env, "HEADRACE_NATS_URL": one.nats_url, "HEADRACE_MODEL_NAME": f"other,{ALIAS}"}
    other = subprocess.run([*HEADRACE, "serve", "tokenizer"], env=env, capture_output=True, timeout=60)
    assert other.returncode != 0
    assert f"'{ALIAS}' is a name of model '{MODEL}' on this server" in other.stderr.decode()


def tokenizer_of(up: Up, model: Path) -> int:
    (pid,) = (
        pid
        for pid in faults.pids_of(up.process.pid, "tokenizer")
        if f"tokenizer@{model.stem}" in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    )
    return pid


@pytest.mark.timeout(180)
def test_missing_service_of_one_model_is_an_error_of_that_model_alone(both: TwoModels) -> None:
    """Its one tokenizer is gone: 503 at once and not 404, nor silence; the gateway goes on. Before, a request
    that the tokenizer took with it, and one that ran, got their answers after it had been started again."""
    up, second = both.up, both.second
    with httpx.Client(base_url=up.http_url, timeout=60) as http:
        wanted = [ask(http, "tiny", prompt).json()["choices"] for prompt in "ab"]
        victim = tokenizer_of(up, second)
        with ThreadPoolExecutor() as pool:
            running = pool.submit(ask, http, "tiny", "a")
            time.sleep(0.05)  # for most of its 8 tokens, or all of them
            os.kill(victim, signal.SIGSTOP)
            lost = pool.submit(ask, http, "tiny", "b")
            time.sleep(0.5)  # it is in the tokenizer's socket
            os.kill(victim, signal.SIGKILL)
            assert [each.result().json()["choices"] for each in (running, lost)] == wanted
        victim = tokenizer_of(up, second)
        os.kill(victim, signal.SIGKILL)
        wait_until_gone([victim])  # while it dies the server still gives it what comes
        time.sleep(0.2)  # and until it has read that the connection has ended
        gone = ask(http, "tiny")
        assert (gone.status_code, gone.headers["retry-after"]) == (503, "1"), gone.text
        assert http.get(http.base_url.copy_with(path="/health")).status_code == 200
        assert ask(http, MODEL).status_code == 200
        while ask(http, "tiny").status_code != 200:  # it is started again
            time.sleep(0.01)
