"""Starts, drains, kills, deaths: exit statuses, nothing lost in a drain, and no process left."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.running_up import BY_DEFAULT_DURABLE, HEADRACE, StartUp, Up, end, starter, wait_until_gone
from support.source_tree import ROOT

from loadtest import faults
from services.launcher.nats_server import NatsServer
from shared.config import Settings
from shared.processes import unix_url

SLOW = {"HEADRACE_SIM": "step=20000,token=20"}


@pytest.fixture
def start_up(tmp_path: Path) -> Iterator[StartUp]:
    """Servers as they are by default: with durable requests."""
    running: list[Up] = []
    yield starter(tmp_path, running, BY_DEFAULT_DURABLE)
    end(running)


def streaming(up: Up, tokens: int) -> subprocess.Popen[str]:
    """A client of an answer of so many tokens, whose request has been accepted."""
    asking = subprocess.Popen(
        [*HEADRACE, "request", "--stream", f'{{"prompt": "Hello", "max_tokens": {tokens}, "seed": 1}}'],
        env=up.env, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert asking.stdout is not None
    assert json.loads(asking.stdout.readline())["type"] == "accepted"
    return asking


def test_gateways_share_a_port_survive_each_other_and_end_on_a_hang_up(
    start_up: StartUp,
) -> None:
    up = start_up("--gateways", "2", HEADRACE_HTTP="127.0.0.1:0")
    root = up.http_url.removesuffix("/v1")
    pids = faults.pids_of(up.process.pid, "gateway")
    assert len(pids) == 2

    def ask(path: str) -> httpx.Response:
        return httpx.get(f"{root}{path}", timeout=120)  # each on a connection of its own

    counted: set[str] = set()
    for _ in range(400):  # until both have come up, and each has been given some
        page = ask("/metrics").text  # the gateway that answers has this request
        counted |= set(re.findall(r'active_requests{instance="(\w+)",service="gateway"} 1', page))
        if len(counted) == 2:
            break
    assert len(counted) == 2
    asked: list[int] = []
    while len(asked) < 2:  # on a busy machine an answer may come late
        services = json.loads(up.run("status", "--json").stdout)["services"]
        asked = [service["requests"] for service in services if "url" in service]
    assert min(asked) > 0
    other = up.run("up", "--backend", "sim", "--gateways", "2", "--http", root.removeprefix("http://"))
    assert (other.returncode, "the gateway cannot listen on" in other.stderr) == (1, True)
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(ProcessLookupError):
        while True:
            os.kill(pids[0], 0)
    assert [ask("/v1/models").status_code for _ in range(20)] == [200] * 20
    assert up.stop(signal.SIGHUP) == 0


def test_a_socket_is_served_replaced_and_removed(start_up: StartUp, tmp_path: Path) -> None:
    path = tmp_path / "h.sock"
    up = start_up(HEADRACE_HTTP=f"unix:{path}")
    assert up.http_url == f"{unix_url(str(path))}/v1"
    (curl,) = (line.partition("with curl:")[2] for line in up.printed if "with curl:" in line)
    *command, url = shlex.split(curl)
    assert command == ["curl", "--unix-socket", str(path)]
    transport = httpx.HTTPTransport(uds=str(path))
    http = httpx.Client(transport=transport, timeout=120)
    assert len(http.get(url).json()["data"]) == 1
    status = up.run("status").stdout
    assert unix_url(str(path)) in status
    assert "The page:" not in status
    other = up.run("up", "--backend", "sim", "--http", f"unix:{path}")
    assert (other.returncode, "another process listens there" in other.stderr) == (1, True)
    os.kill(up.child("gateway"), signal.SIGKILL)  # its file stays, and the next gateway replaces it
    with contextlib.closing(http):
        while True:
            with contextlib.suppress(httpx.TransportError):
                if http.get("http://localhost/health").status_code == 200:
                    break
    assert up.stop(signal.SIGTERM) == 0
    assert not path.exists()


def test_waiting_client_gets_an_error_when_the_time_to_drain_is_over(start_up: StartUp) -> None:
    up = start_up(HEADRACE_SIM="step=100000", HEADRACE_HTTP="127.0.0.1:0", HEADRACE_DRAIN_TIMEOUT_S="1")
    children = up.children()
    long = {"prompt": "Hello", "max_tokens": 2000, "ignore_eos": True}
    asking = [
        subprocess.Popen(
            [*HEADRACE, "request", *flags, json.dumps(long)],
            env=up.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for flags in (["--stream"], [])
    ]  # fmt: skip
    assert asking[0].stdout is not None
    assert json.loads(asking[0].stdout.readline())["type"] == "accepted"
    body = {"model": "smollm2-135m-instruct", **long}
    with (
        httpx.Client(base_url=up.http_url, timeout=60) as http,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        plain = pool.submit(http.post, "/completions", json=body)
        with http.stream("POST", "/completions", json={**body, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            while requests(up) < 4:  # a client that starts late would be refused: the server drains
                pass
            assert up.stop(signal.SIGTERM) == 0
            events = [line.removeprefix("data: ") for line in lines if line]
    assert "its time to drain is over" in json.loads(events[-1])["error"]["message"]
    assert plain.result().status_code == 503
    assert "its time to drain is over" in plain.result().json()["error"]["message"]
    for each in asking:
        _, output = each.communicate(timeout=120)
        assert each.returncode == 1
        assert "its time to drain is over" in output
    assert up.printed[-1] == "stopped: requests that did not end in time got an error"
    wait_until_gone(children)


def requests(up: Up) -> int:
    """How many requests the scheduler has."""
    services = json.loads(up.run("status", "--json").stdout)["services"]
    (scheduler,) = (service for service in services if service["kind"] == "scheduler")
    return int(scheduler["requests"])


def test_stream_is_not_cut_when_the_reader_of_the_launchers_output_is_gone(start_up: StartUp) -> None:
    """`headrace up | tee log`, Ctrl-C: tee has gone first."""
    up = start_up(**SLOW)
    children = up.children()
    asking = streaming(up, 50)
    assert up.process.stdout is not None
    up.process.stdout.close()
    up.process.send_signal(signal.SIGINT)
    frames = [json.loads(line) for line in asking.communicate(timeout=60)[0].splitlines()]
    assert (frames[-1]["type"], frames[-1]["usage"]["completion_tokens"]) == ("done", 50)
    assert up.process.wait(60) == 130
    wait_until_gone(children)


def test_sigterm_drains_and_what_http_refuses_then_nats_refuses_too(start_up: StartUp) -> None:
    """A death meanwhile loses no answer."""
    up = start_up(HEADRACE_SIM="step=50000", HEADRACE_HTTP="127.0.0.1:0")
    children = up.children()
    assert len(children) == 9  # seven services, the nats-server and the fork server
    asking = streaming(up, 100)
    body = {"model": "smollm2-135m-instruct", "prompt": "Hello", "max_tokens": 200, "ignore_eos": True}
    with (
        httpx.Client(base_url=up.http_url, timeout=60) as http,
        http.stream("POST", "/completions", json={**body, "stream": True}) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        tokenizer = up.child("tokenizer")
        up.process.send_signal(signal.SIGTERM)
        up.read_until("^draining")
        wait_until_gone([tokenizer])
        refused = up.run("request", json.dumps(body))
        assert (refused.returncode, refused.stdout) == (1, "")
        assert refused.stderr.startswith("error (unavailable)"), refused.stderr
        with pytest.raises(httpx.ConnectError):
            httpx.post(f"{up.http_url}/completions", json=body)
        os.kill(up.child("executor"), signal.SIGKILL)
        events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
    assert up.stop() == 0
    frames = [json.loads(line) for line in asking.communicate(timeout=120)[0].splitlines()]
    assert (frames[-1]["type"], frames[-1]["usage"]["completion_tokens"]) == ("done", 100)
    assert up.printed[-1] == "stopped"
    wait_until_gone(children)
    assert list(Path(up.env["XDG_RUNTIME_DIR"]).glob("headrace/*.json")) == []  # its note


def test_a_second_ctrl_c_kills(start_up: StartUp) -> None:
    up = start_up(HEADRACE_SIM="step=1000000,token=20")
    children = up.children()
    asking = subprocess.Popen(
        [*HEADRACE, "request", "--stream", '{"prompt": "Hello", "max_tokens": 1000}'],
        env=up.env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert asking.stdout is not None
    asking.stdout.readline()
    up.process.send_signal(signal.SIGINT)
    up.read_until("^draining")
    assert up.stop(signal.SIGINT) == 130
    assert up.printed[-1] == "killed"
    wait_until_gone(children)
    asking.kill()
    asking.communicate()


def test_ctrl_c_before_it_is_ready(start_up: StartUp) -> None:
    up = start_up(wait=False)
    while len(children := up.children()) < 7:
        assert up.process.poll() is None
    assert up.stop(signal.SIGINT) == 130
    wait_until_gone(children)


def test_service_that_dies_or_hangs_is_replaced_and_two_of_each_edge_run_by_default(
    start_up: StartUp,
) -> None:
    """As nohup starts it: a hang-up does not end what was started to ignore it. At the end: Ctrl-C."""
    two = {"HEADRACE_TOKENIZERS": "2", "HEADRACE_DETOKENIZERS": "2"}
    up = start_up(ignored=(signal.SIGHUP, signal.SIGINT), **two)
    up.process.send_signal(signal.SIGHUP)
    assert (Settings().tokenizers, Settings().detokenizers) == (2, 2)
    hung = [up.child("scheduler"), up.child("nats-server")]
    for pid in hung:
        os.kill(pid, signal.SIGSTOP)
    wait_until_gone(hung)
    ask = ("request", '{"prompt": "Hello", "max_tokens": 2}')
    while up.run(*ask).returncode:
        pass
    dead = faults.pids_of(up.process.pid, "tokenizer")
    for pid in dead:
        os.kill(pid, signal.SIGKILL)
    wait_until_gone(dead)
    answered = None
    while answered is None or answered.returncode:  # the launcher waits half a second, then starts them
        answered = up.run(*ask)
        assert not answered.returncode or "(unavailable)" in answered.stderr, answered.stderr
    while len(faults.pids_of(up.process.pid, "tokenizer")) < 2:
        pass
    kinds = [len(faults.pids_of(up.process.pid, kind)) for kind in ("tokenizer", "scheduler", "detokenizer")]
    assert kinds == [2, 1, 2]
    output = up.log.read_text()
    assert "was ended by SIGKILL (not by this command: perhaps by the kernel" in output
    assert re.search(r"scheduler +\| has sent no heartbeat for 1\d s and used no CPU: killed", output)
    assert output.count("used no CPU: killed") == 1
    children = up.children()
    assert up.stop(signal.SIGINT) == 130
    assert up.printed[-1] == "stopped"
    assert any(re.match(r"nats-server has not answered for 1\d s", line) for line in up.printed)
    wait_until_gone(children)


def test_modules_of_pythonpath_are_imported_and_modules_of_the_working_directory_are_not(
    start_up: StartUp, tmp_path: Path
) -> None:
    """At the end: a launcher that is killed leaves no process."""
    here, plugins = tmp_path / "here", tmp_path / "plugins"
    for folder in (here, plugins):
        folder.mkdir()
    for name in ("inspect", "queue", "numpy", "torch", "services", "shared"):
        (here / f"{name}.py").write_text("raise SystemExit('this file is of another program')")
    (plugins / "mine.py").write_text(
        "class Same:\n"
        "    def __init__(self, args, prompt_tokens): pass\n"
        "    def process(self, generated, logits): return logits\n"
    )
    path = os.pathsep.join((str(ROOT), str(plugins)))
    up = start_up(cwd=here, PYTHONPATH=path, HEADRACE_LOGITS_PROCESSORS="same=mine:Same")
    asked = {"prompt": "Hello", "max_tokens": 2, "logits_processors": ["same"]}
    answered = up.run("request", json.dumps(asked))
    assert answered.returncode == 0, answered.stderr
    children = up.children()
    up.process.kill()
    up.process.wait()
    wait_until_gone(children)


def test_taken_port_is_an_error_that_names_it(start_up: StartUp) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        up = start_up("--port", str(port), wait=False)
        assert up.stop() == 1
    assert (
        f"port {port} of 127.0.0.1 is taken by another program: choose one with --port" in up.log.read_text()
    )


def test_absent_nats_server_of_the_user_is_an_error_that_names_it(start_up: StartUp) -> None:
    up = start_up("--nats-url", "nats://127.0.0.1:1", wait=False)
    assert up.stop() == 1
    assert "no connection to the nats-server at nats://127.0.0.1:1" in up.log.read_text()


def test_a_service_that_cannot_start_ends_it(start_up: StartUp, tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF, by its first bytes")
    up = start_up("--model", str(tmp_path / "broken.gguf"), wait=False)
    assert up.stop() == 1
    output = up.log.read_text().splitlines()[-1]
    assert output.startswith("error (setup): ")
    assert output.endswith(" ended with status 1 before the server was ready: see its last log lines")


def test_several_of_each_service_and_a_server_of_ones_own(
    start_up: StartUp, nats_server: NatsServer, fleet: str
) -> None:
    flags = ("--nats-url", nats_server.url, "--fleet", fleet, "--model-name", "other")
    up = start_up(*flags, "--tokenizers", "2", "--detokenizers", "2")
    children = up.children()
    assert len(children) == 8  # seven services and the fork server
    ask = ("request", "--fleet", fleet, '{"prompt": "Hello", "max_tokens": 3}')
    assert [json.loads(up.run(*ask).stdout)["model"] for _ in range(3)] == ["other"] * 3
    services = json.loads(up.run("status", "--json", "--fleet", fleet).stdout)["services"]
    assert len(services) == 7
    assert up.stop(signal.SIGTERM) == 0
    wait_until_gone(children)
    assert nats_server.process.poll() is None
