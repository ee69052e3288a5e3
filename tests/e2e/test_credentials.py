"""A whole fleet, each process under its own credentials, and two tenants that must not meet."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client as Nats
from support.running_up import HEADRACE, QUICK, Up, running_up, starter

from loadtest import faults
from services.launcher import credentials
from services.launcher.commands import auth
from services.launcher.commands.auth import Plan
from shared.nats import access, permissions

MODEL = "smollm2-135m-instruct"
PROMPT = "The river turns the wheel, and the wheel turns the mill. " * 8


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("auth")
    auth.generate(folder, Plan("nats://nats:4222", "default", ("acme", "bob")), print)
    return folder


@pytest.fixture(scope="module")
def guarded(users: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """`headrace up --auth`, with its event log on NATS."""
    arguments = ("--auth", str(users), "--event-log", "nats")
    with running_up(tmp_path_factory.mktemp("up"), *arguments, HEADRACE_HTTP="127.0.0.1:0") as up:
        yield up
        assert "ermissions" not in up.log.read_text()  # no service was refused a subject


class Client:
    """A plain nats-py client of one tenant; `refused`: the errors of the nats-server."""

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.refused: list[str] = []
        self.nc = Nats()

    async def on_error(self, error: Exception) -> None:
        self.refused.append(str(error))

    async def ask(self, tenant: str, /, **body: Any) -> dict[str, Any]:
        """A plain request in the name of `tenant`."""
        data = json.dumps({"max_tokens": 4, **body}).encode()
        answer = await self.nc.request(f"headrace.v1.generate.{tenant}.{MODEL}", data, timeout=120)
        return dict(json.loads(answer.data))


@asynccontextmanager
async def tenant(up: Up, users: Path, name: str) -> AsyncIterator[Client]:
    client = Client(name)
    url = credentials.url_of(users, name, up.nats_url)
    client.nc = await nats.connect(url, inbox_prefix=f"_INBOX.{name}", error_cb=client.on_error)
    try:
        yield client
    finally:
        await client.nc.close()


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_a_tenant_hits_its_own_cache_and_never_anothers(guarded: Up, users: Path) -> None:
    async with tenant(guarded, users, "acme") as acme, tenant(guarded, users, "bob") as bob:
        first, second = [await acme.ask("acme", prompt=PROMPT) for _ in range(2)]
        others = [await bob.ask("bob", prompt=PROMPT) for _ in range(2)]
        assert cached(first) == 0
        assert cached(second) > 64
        assert [cached(a) for a in others] == [0, cached(second)]


def http_status(url: str, key: str) -> int:
    head = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=head), timeout=120) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        return refused.code


def test_client_without_a_key_of_its_own_is_refused(guarded: Up, users: Path) -> None:
    """The keys in the folder hold, though no setting names them."""
    paths = {name: users / name / "api_key" for name in ("tenants/acme", "operator")}
    keys = ["", "junk", *(path.read_text().strip() for path in paths.values())]
    root = guarded.http_url.removesuffix("/v1")
    link = run(guarded, "status").stdout.splitlines()[-1].removeprefix("The page: ")
    assert link == f"{root}/#key={paths['operator'].read_text().strip()}"
    assert http_status(link, "") == 200, "the page itself needs no key"
    got = {path: [http_status(root + path, key) for key in keys] for path in ("/v1/models", "/metrics")}
    assert got == {"/v1/models": [401, 401, 200, 200], "/metrics": [401, 401, 403, 200]}
    assert http_status(f"{root}/health", "") == 200


def ask_http(up: Up, users: Path, tenant: str, prompt: str) -> dict[str, Any]:
    key = (users / "tenants" / tenant / "api_key").read_text().strip()
    request = urllib.request.Request(
        f"{up.http_url}/completions",
        json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 4}).encode(),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return dict(json.load(answer))


async def test_api_key_gives_the_cache_of_its_tenant(guarded: Up, users: Path) -> None:
    prompt = f"Over HTTP: {PROMPT}"
    async with tenant(guarded, users, "acme") as acme:
        await acme.ask("acme", prompt=prompt)
    hits = [cached(ask_http(guarded, users, name, prompt)) for name in ("acme", "bob")]
    assert hits[0] > 64
    assert hits[1] == 0


async def test_client_cannot_publish_in_another_tenants_name(guarded: Up, users: Path) -> None:
    async with tenant(guarded, users, "acme") as acme, tenant(guarded, users, "bob") as bob:
        with pytest.raises(nats.errors.TimeoutError):
            await bob.nc.request(f"headrace.v1.generate.acme.{MODEL}", b'{"prompt":"x"}', timeout=0.5)
        assert len(bob.refused) == 1
        assert f'publish to "headrace.v1.generate.acme.{MODEL}"' in bob.refused[0].lower()
        for field in ("tenant", "salt", "cache_salt"):  # nor by a field of the request
            refused = await bob.ask("bob", prompt=PROMPT, **{field: "acme"})
            assert (refused["error"]["code"], refused["error"]["param"]) == (400, field)
        assert acme.refused == []


async def test_no_service_carries_an_answer_into_anothers_inbox(guarded: Up, users: Path) -> None:
    """acme may not publish there, and no service does it for acme."""
    async with tenant(guarded, users, "acme") as acme, tenant(guarded, users, "bob") as bob:
        forged = await bob.nc.subscribe("_INBOX.bob.>")
        await bob.nc.flush()
        body = json.dumps({"prompt": "x", "max_tokens": 2, "tokens": [1]}).encode()
        for model in (MODEL, "unknown", "=Z"):
            for verb in ("generate", "tokenize", "detokenize"):
                subject = f"headrace.v1.{verb}.acme.{model}"
                await acme.nc.publish(subject, body, reply="_INBOX.bob.client.1")
        await acme.nc.publish("headrace.v1.models.acme", b"", reply="_INBOX.bob.client.1")
        for verb in ("models.acme", f"tokenize.acme.{MODEL}", f"generate.acme.{MODEL}"):
            # each answer comes after the one to the forged request
            data = b'{"prompt":"x","max_tokens":9}'
            assert (await acme.nc.request(f"headrace.v1.{verb}", data, timeout=120)).data
        await bob.nc.flush()
        assert forged.pending_msgs == 0
        assert acme.refused == []


async def test_a_stream_is_read_and_cancelled_by_its_tenant_alone(guarded: Up, users: Path) -> None:
    async with tenant(guarded, users, "acme") as acme, tenant(guarded, users, "bob") as bob:
        inbox = acme.nc.new_inbox()
        frames = await acme.nc.subscribe(inbox)
        spies = [await bob.nc.subscribe(pattern) for pattern in (inbox, "_INBOX.acme.>", ">")]
        await bob.nc.flush()
        await bob.nc.flush()
        assert len(bob.refused) == len(spies)
        body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True, "request_id": "mine"}
        await acme.nc.publish(f"headrace.v1.generate.acme.{MODEL}", json.dumps(body).encode(), reply=inbox)
        assert json.loads((await frames.next_msg(30)).data)["type"] == "accepted"
        for subject in ("headrace.v1.cancel.acme.mine", "headrace.v1.cancel.bob.mine"):
            await bob.nc.publish(subject)
        seen, ended = 0, False
        while not ended:
            message = await frames.next_msg(30)
            frame = json.loads(message.data)
            assert frame["type"] in ("delta", "done")
            ended = "Headrace-End" in (message.headers or {})
            seen += 1
        assert frame["usage"]["completion_tokens"] == 200  # neither cancel was received
        assert seen > 1
        assert [spy.pending_msgs for spy in spies] == [0, 0, 0]


def run(up: Up, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HEADRACE, *args], env={**up.env, **env}, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_operators_commands_work_without_a_flag(guarded: Up, tmp_path: Path) -> None:
    answer = json.loads(run(guarded, "request", '{"prompt": "Hello", "max_tokens": 3}').stdout)
    assert answer["usage"]["completion_tokens"] == 3
    status = json.loads(run(guarded, "status", "--json").stdout)
    kinds = {s["kind"] for s in status["services"]}
    assert kinds == {*permissions.SERVICES} - {"keeper"}  # `--no-durable`
    assert "@" not in json.dumps(status)  # no passwords
    traced = run(guarded, "trace", answer["id"])
    assert "tokenize" in traced.stdout
    recorded = run(guarded, "record", str(tmp_path / "log"), "--seconds", "0.5")
    assert recorded.returncode == 0, recorded.stderr


def test_tenants_command_line_acts_in_its_name_alone(guarded: Up, users: Path) -> None:
    url = credentials.url_of(users, "bob", guarded.nats_url)
    answer = run(guarded, "request", '{"prompt": "Hello", "max_tokens": 3}', HEADRACE_NATS_URL=url)
    assert json.loads(answer.stdout)["usage"]["completion_tokens"] == 3
    denied = run(guarded, "status", HEADRACE_NATS_URL=url)
    assert denied.returncode == 1
    assert "these credentials do not allow this" in denied.stderr
    assert access.password_of(url) not in denied.stderr + denied.stdout


@pytest.mark.parametrize(
    ("login_of", "reason"),
    [
        ("", "refuses a connection without user and password"),
        ("headrace-tokenizer:wrong@", "refuses user 'headrace-tokenizer'"),
        ("executor", "the nats-server refuses: nats: permissions violation for subscription"),
        ("acme", "the nats-server refuses: nats: permissions violation for subscription"),
    ],
)
def test_a_service_without_its_credentials_does_not_start(
    guarded: Up, users: Path, login_of: str, reason: str
) -> None:
    plain = guarded.nats_url
    url = plain.replace("//", f"//{login_of}")
    if login_of in ("executor", "acme"):
        url = credentials.url_of(users, login_of, plain)
    ended = run(guarded, "serve", "tokenizer", HEADRACE_NATS_URL=url)
    assert ended.returncode == 1
    assert reason in ended.stderr
    assert "`headrace auth`" in ended.stderr


def test_health_check_fails_while_its_own_process_is_absent_hung_or_stopped(
    guarded: Up, users: Path, tmp_path: Path
) -> None:
    env = {
        **guarded.env,
        "HEADRACE_CONFIG": str(users / "detokenizer" / "headrace.toml"),
        "HEADRACE_NATS_URL": credentials.url_of(users, "detokenizer", guarded.nats_url),
        "XDG_RUNTIME_DIR": str(tmp_path),
    }
    absent = run(guarded, "health", "detokenizer", **env)
    assert (absent.returncode, "no detokenizer runs here" in absent.stderr) == (1, True)
    process = subprocess.Popen(
        [*HEADRACE, "serve", "detokenizer"], env=env, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        while "is ready" not in process.stderr.readline():
            assert process.poll() is None
        assert run(guarded, "health", "detokenizer", **env).returncode == 0
        process.send_signal(signal.SIGSTOP)
        while not (hung := run(guarded, "health", "detokenizer", **env)).returncode:
            pass  # until its beat is late
        assert "the detokenizer here has sent no heartbeat for" in hung.stderr
        process.send_signal(signal.SIGCONT)
        while run(guarded, "health", "detokenizer", **env).returncode:
            pass  # until it has beaten again
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        assert process.wait(30) == 0
        process.stderr.close()
    gone = run(guarded, "health", "detokenizer", **env)
    assert (gone.returncode, "the detokenizer here is stopped" in gone.stderr) == (1, True)


async def test_services_come_back_after_the_broker_died(guarded: Up, users: Path) -> None:
    (server,) = [p for p in guarded.children() if "nats-server" in _command(p)]
    os.kill(server, signal.SIGKILL)
    async with tenant(guarded, users, "acme") as acme:
        answer = await acme.ask("acme", prompt=PROMPT)
        assert answer["usage"]["completion_tokens"] == 4
    kinds = {kind: faults.pids_of(guarded.process.pid, kind) for kind in ("scheduler", "executor")}
    assert all(len(pids) == 1 for pids in kinds.values())


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def test_a_file_of_credentials_that_is_missing_is_named(guarded: Up, tmp_path: Path) -> None:
    env = {name: value for name, value in guarded.env.items() if name not in QUICK}
    ended = run(guarded, "serve", "tokenizer", **env, HEADRACE_CONFIG=str(tmp_path / "none.toml"))
    assert ended.returncode == 1
    assert f"no configuration file {tmp_path / 'none.toml'}" in ended.stderr


def test_a_host_joins_with_the_credentials_of_its_own_services_alone(
    guarded: Up, users: Path, tmp_path: Path
) -> None:
    own, server = tmp_path / "own", guarded.nats_url
    for kind in ("executor", "kv_offload"):
        shutil.copytree(users / kind, own / kind)
    join = ("--join", server, "--auth", str(own), "--host-id", "beta")
    host = starter(tmp_path, [])(*join)
    assert "  joined as:  host beta" in host.printed
    kinds: list[str] = []
    while kinds != ["executor", "kv_offload"]:  # the host is ready before its kv_offload is
        found = json.loads(run(guarded, "status", "--json").stdout)["services"]
        kinds = sorted(s["kind"] for s in found if s["host"] == "beta")
    assert host.stop(signal.SIGTERM) == 0
    assert "ermissions" not in host.log.read_text()

    def refused(*args: str) -> str:
        ended = run(guarded, "up", *args)
        assert ended.returncode == 1, ended.stdout
        return ended.stderr

    nowhere = "nats://127.0.0.1:9"
    assert f"no connection to the nats-server at {nowhere}" in refused("--join", nowhere)
    assert "refuses a connection without user and password" in refused("--join", server)
    assert "no credentials in" in refused("--join", server, "--auth", str(tmp_path))
    other = refused(*join, "--fleet", "other")
    assert "these credentials do not allow this" in other
    assert "no service of fleet 'other' answers" in other
    assert "have 16 tokens in this fleet, and 32 here" in refused(*join, "--block-tokens", "32")
    assert f"fleet 'default' serves {MODEL}, not x" in refused(*join, "--model-name", "x")
    alone = refused(*join, "--deterministic")
    assert "are not those of the executors that serve it" in alone
    assert "executor ended with status 1 before the server was ready" in alone
