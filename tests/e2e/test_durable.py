"""Durable requests on a real fleet: submitted, answered, and answered after the loss of every process."""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.running_up import (
    BY_DEFAULT_DURABLE,
    StartUp,
    Up,
    end,
    running_up,
    starter,
    wait_until_gone,
)
from support.source_tree import ROOT

from loadtest import faults
from loadtest.durable import (
    MODEL,
    acked,
    all_records,
    plain,
    record_of,
    simulated,
    submit_all,
)
from services.launcher import credentials
from services.launcher.commands import auth
from services.launcher.commands.auth import Plan
from shared.client.client import Client
from shared.errors import DuplicateRequest, UnknownModel
from shared.nats import subjects
from shared.nats.bus import NatsBus

REQUESTS = 72
LOST_S = 120  # far above the 10 s after which deliveries come again: a guard against hanging


async def submitted(up: Up, ended: int) -> None:
    """Submit all requests; returns when `ended` of them have a record."""
    bus = await NatsBus.connect(up.nats_url, timeout_s=30)
    client, news, enough = await Client.open(bus), list[bytes](), asyncio.Event()

    def on_news(delivery: Any) -> None:
        news.append(delivery.data)
        if len(news) >= ended:
            enough.set()

    await bus.subscribe("headrace.v1.done.*.*", on_news)
    numbered = [simulated(i) for i in range(REQUESTS)]
    asked = [client.request(subjects.submit(tenant, MODEL), body) for tenant, body in numbered]
    answers = await asyncio.gather(*asked)
    assert [a["id"] for a in answers] == [body["request_id"] for _, body in numbered]
    await asyncio.wait_for(enough.wait(), LOST_S)
    await bus.drain()


async def outcome(up: Up) -> tuple[list[dict[str, Any]], list[str], Counter[str]]:
    """The records; the text of each request on this fleet without a keeper; messages of the two streams."""
    numbered = [simulated(i) for i in range(REQUESTS)]
    replies = {i: {"status": "queued"} for i in range(REQUESTS)}
    records, counts = await all_records(up.nats_url, numbered, replies)
    seeded = [(tenant, {**body, "speculate": False}) for tenant, body in numbered if "seed" in body]
    answers = await plain(up.nats_url, seeded)
    return records, [answer["choices"][0]["text"] for answer in answers], counts


def kill(up: Up) -> None:
    """SIGKILL for `up`, each of its services and its nats-server."""
    pids = up.children()
    faults.kill_all(up.process.pid)
    up.process.wait()
    wait_until_gone(pids)


def test_every_request_has_one_record_after_the_loss_of_every_process(
    start_up: StartUp, tmp_path: Path
) -> None:
    state = {"XDG_STATE_HOME": str(tmp_path), "HEADRACE_SIM": "step=4000,accept=70"}  # with drafts
    first = start_up("--durable", **state)
    moment = random.Random().randrange(10, 55)
    asyncio.run(submitted(first, moment))
    kill(first)
    second = start_up("--durable", **state)
    assert f"durable in: {tmp_path}/headrace/default/durable" in "\n".join(second.printed)
    records, plain, counts = asyncio.run(outcome(second))
    assert Counter(r["status"] for r in records) == {"completed": REQUESTS}, f"killed after {moment} records"
    assert counts == {subjects.WORK_STREAM: 0, subjects.RECORD_STREAM: REQUESTS}
    texts = [r["answer"]["choices"][0]["text"] for i, r in enumerate(records) if "seed" in simulated(i)[1]]
    assert texts == plain, f"killed after {moment} records"
    services = json.loads(second.run("status", "--json").stdout)["services"]
    assert sum(each["measured"]["drafts"]["accepted"] for each in services if each["kind"] == "scheduler") > 0


@pytest.fixture(scope="module")
def durable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """One fleet for tests after which it works as before."""
    with running_up(tmp_path_factory.mktemp("durable"), "--durable") as up:
        yield up


def test_the_same_request_again_after_the_server_was_killed_is_not_computed_again(durable: Up) -> None:
    up = durable  # without a record yet
    tenant, body = simulated(1)

    async def hundred_times() -> tuple[set[str], Counter[str]]:
        bus = await NatsBus.connect(up.nats_url, timeout_s=20)
        client = await Client.open(bus)
        tries = [asyncio.create_task(submit_all(client, [(tenant, body)], {})) for _ in range(100)]
        await asyncio.gather(*tries)
        await record_of(client, tenant, body["request_id"])
        answered = await client.request(subjects.submit(tenant, MODEL), body)
        counts = await acked(bus)
        await bus.drain()
        return {answered["status"]}, counts

    once = {"completed"}, Counter({subjects.RECORD_STREAM: 1})
    assert asyncio.run(hundred_times()) == once
    before = generated(up)
    faults.kill(up.child("nats-server"))
    assert asyncio.run(hundred_times()) == once
    assert generated(up) == before


def test_a_session_in_the_shell(durable: Up) -> None:
    up = durable
    submit = ("submit", "Hi", "--id", "first", "--max-tokens", "5", "--seed", "7", "--checkpoints")
    output = up.run(*submit)
    assert (output.returncode, output.stdout, output.stderr) == (0, "first\n", "")
    again = up.run(*submit)
    assert (again.returncode, again.stdout) == (0, "first\n")
    read = up.run("result", "first", "--wait")
    assert (read.returncode, read.stderr) == (0, "")
    assert read.stdout == up.run("chat", "-q", "Hi", "--max-tokens", "5", "--seed", "7").stdout
    other = up.run("submit", "Ho", "--id", "first")
    assert (other.returncode, other.stdout) == (1, "")
    assert "error (duplicate request): another request was submitted as first" in other.stderr
    wrong = up.run("submit", "Hi", "--temperature", "9")
    assert (wrong.returncode, "error (invalid request): `temperature`" in wrong.stderr) == (1, True), (
        wrong.stderr
    )
    unknown = up.run("result", "second")
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert "error (request not found): no durable request 'second'" in unknown.stderr


def test_server_without_a_folder_runs_without_a_keeper_by_default(tmp_path: Path) -> None:
    """One that shall be durable does not start. Without a keeper a submit ends in an error."""
    running: list[Up] = []
    start = starter(tmp_path, running, BY_DEFAULT_DURABLE)
    (tmp_path / "file").touch()
    try:
        off = "durable requests are off: "
        first = start(XDG_STATE_HOME=str(tmp_path))
        second = start(XDG_STATE_HOME=str(tmp_path))
        third = start(wait=False, XDG_STATE_HOME=str(tmp_path / "file"))
        third.read_until(f"{off}durable requests cannot be kept in")
        third.stop(signal.SIGINT)
        named = [len(faults.pids_of(up.process.pid, "keeper")) for up in (first, second)]
        assert named == [1, 0]
        assert not [line for line in first.printed if off in line]
        assert [line for line in second.printed if f"{off}another `headrace up` keeps" in line]
        assert first.run("submit", "Hi", "--max-tokens", "2").returncode == 0
        for command in (("submit", "Hi"), ("result", "x")):
            refused = second.run(*command)
            assert refused.returncode == 1
            assert (
                "error (unavailable): no keeper answers: is `headrace up` running, without `--no-durable`?"
                in refused.stderr
            )
        durable = start("--durable", wait=False, XDG_STATE_HOME=str(tmp_path))
        assert durable.process.wait(60) == 1
        assert "keeps durable requests in" in durable.log.read_text()
    finally:
        end(running)


def test_tenant_reads_only_its_own_requests_under_credentials(start_up: StartUp, tmp_path: Path) -> None:
    users = tmp_path / "users"
    auth.generate(users, Plan("nats://nats:4222", "default", ("acme", "bob")), print)
    up = start_up("--durable", "--auth", str(users))

    async def meet() -> None:
        buses = [
            await NatsBus.connect(credentials.url_of(users, n, up.nats_url), timeout_s=30)
            for n in ("acme", "bob")
        ]
        acme, bob = [await Client.open(bus, name) for bus, name in zip(buses, ("acme", "bob"), strict=True)]
        asked = {"prompt": "Hi", "max_tokens": 3, "request_id": "r"}
        assert (await acme.request(subjects.submit("acme", MODEL), asked))["status"] == "queued"
        assert (await record_of(acme, "acme", "r"))["status"] == "completed"
        with pytest.raises(UnknownModel, match="no durable request 'r' of this tenant"):
            await bob.request(subjects.result("bob", "r"))
        assert (await bob.request(subjects.submit("bob", MODEL), {**asked, "max_tokens": 2}))[
            "status"
        ] == "queued"
        with pytest.raises(DuplicateRequest):
            await acme.request(subjects.submit("acme", MODEL), {**asked, "max_tokens": 2})
        for bus in buses:
            await bus.drain()

    asyncio.run(meet())
    assert "ermissions" not in up.log.read_text()


def test_a_request_that_kills_executors_fails_alone(start_up: StartUp, tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text(
        "import os\n"
        "class Deadly:\n"
        "    def __init__(self, args, prompt_tokens): pass\n"
        "    def process(self, generated, logits): os._exit(3)\n"
    )
    up = start_up(
        "--durable", "--logits-processors", "deadly=deadly:Deadly", HEADRACE_SIM="step=5000",
        HEADRACE_HEARTBEAT_INTERVAL_MS="1000",  # as by default: a silent executor counts as dead, too
        PYTHONPATH=os.pathsep.join((str(ROOT), str(tmp_path))),
    )  # fmt: skip
    numbered = [simulated(i) for i in range(15)]
    numbered.insert(8, ("acme", {"prompt": "Hi", "request_id": "deadly", "logits_processors": ["deadly"]}))
    records, counts = asyncio.run(all_records(up.nats_url, numbered, {}))
    others = {i: record for i, record in enumerate(records) if record["status"] != "completed"}
    assert others == {8: {"status": "failed", "code": 500}}
    assert counts == {subjects.WORK_STREAM: 0, subjects.RECORD_STREAM: 16}


def test_a_disk_that_is_full_for_a_while_loses_nothing(start_up: StartUp) -> None:
    # Beats as by default: on a busy machine an executor is to be silent for less than a death goes unnoticed.
    up = start_up("--durable", HEADRACE_HEARTBEAT_INTERVAL_MS="1000")
    numbered, replies = [simulated(i) for i in range(30)], dict[int, dict[str, Any]]()

    async def fill() -> None:
        bus = await NatsBus.connect(up.nats_url, timeout_s=20)
        client = await Client.open(bus)
        await submit_all(client, numbered[:10], replies)
        # As with a full disk, the next write fails. A server that is started again has no such limit.
        resource.prlimit(up.child("nats-server"), resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        await submit_all(client, numbered, replies)
        await bus.drain()

    asyncio.run(fill())
    records, counts = asyncio.run(all_records(up.nats_url, numbered, replies))
    assert {record["status"] for record in records} == {"completed"}
    assert counts == {subjects.WORK_STREAM: 0, subjects.RECORD_STREAM: 30}
    up.stop(signal.SIGTERM)
    assert any("could not write durable requests" in line for line in up.printed)


def generated(up: Up) -> int:
    """Tokens of the fleet since its start."""
    output = json.loads(up.run("status", "--json").stdout)
    return sum(service["tokens"] for service in output["services"] if service["kind"] == "detokenizer")
