"""What `headrace up` prints of the fleet that it has started."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from support.memory_bus import MemoryBroker

from services.launcher.heartbeats import HeartbeatNote
from services.launcher.supervisor import service_specs
from services.launcher.up import (
    Flags,
    Readiness,
    _Logins,
    _Up,
    announce_death,
    same_seed,
    starts_later,
)
from services.launcher.up import up as start_up
from shared.config import load
from shared.errors import SetupError
from shared.nats import subjects
from shared.nats.interface import Bus, Delivery
from shared.replies import to_json


@pytest.mark.parametrize(
    ("dtype", "deterministic", "shown"),
    [
        ("f32", False, "same tokens in any batch (f32)"),
        ("packed/f16", False, "same tokens in any batch (packed)"),
        ("f32/fp8", False, "other requests may change the tokens (f32/fp8), except with --deterministic"),
        ("bf16", True, "same tokens in any batch (deterministic)"),
        ("bf16", False, "other requests may change the tokens (bf16), except with --deterministic"),
        ("int8", False, "other requests may change the tokens (int8), except with --deterministic"),
        ("none", False, ""),  # the simulated engine
        ("", False, ""),
    ],
)
def test_promise_of_a_seed_depends_on_the_dtype_and_the_mode(
    dtype: str, deterministic: bool, shown: str
) -> None:
    assert same_seed(dtype, deterministic=deterministic) == shown


def test_one_tokenizer_and_detokenizer_of_each_model_start_first_on_few_cores() -> None:
    specs = service_specs({"gateway": 1, "kv_offload": 1})
    for model in ("m", "n"):
        counts = {"tokenizer": 2, "executor": 2, "detokenizer": 1}
        specs += service_specs(counts, f"@{model}", {"HEADRACE_MODEL": model})
    assert starts_later(specs) == {"kv_offload", "tokenizer-1@m", "tokenizer-1@n"}


@pytest.mark.parametrize(("models", "executors", "shown"), [("a", 1, "1"), ("a", 2, "2"), ("ab", 1, "2")])
async def test_executor_gets_the_number_that_shares_l1(
    models: str, executors: int, shown: str, tmp_path: Path
) -> None:
    for name in models:
        (tmp_path / f"{name}.gguf").touch()
    settings = load(flags={"executors": executors, "http": "off", "durable": False}).settings
    up = _Up(settings, {name: str(tmp_path / f"{name}.gguf") for name in models}, None, _Logins("nats://n:1"))
    specs = [service.spec for service in up._supervisor.services]
    assert {spec.env["HEADRACE_EXECUTORS"] for spec in specs if spec.kind == "executor"} == {shown}
    assert not [spec for spec in specs if spec.kind == "kv_offload" and "HEADRACE_EXECUTORS" in spec.env]
    assert up._supervisor._env["HEADRACE_AWAITED_MODELS"] == ",".join(models)
    up._folder.cleanup()
    up._pages.close()


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ({"device": "cuda"}, ["2", "3"]),
        ({"device": "auto"}, ["2", "3"]),
        ({"device": "cpu"}, ["2,3", "2,3"]),
        ({"device": "cuda/tp2"}, ["2,3", "2,3"]),
        ({"device": "auto", "backend": "sim"}, ["2,3", "2,3"]),
    ],
)
async def test_executors_on_gpus_see_one_each(
    flags: dict[str, str], shown: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    (tmp_path / "a.gguf").touch()
    settings = load(flags={"executors": 2, "http": "off", "durable": False, **flags}).settings
    up = _Up(settings, {"a": str(tmp_path / "a.gguf")}, None, _Logins("nats://n:1"))
    specs = [service.spec for service in up._supervisor.services if service.spec.kind == "executor"]
    assert [{**up._supervisor._env, **spec.env}["CUDA_VISIBLE_DEVICES"] for spec in specs] == shown
    up._folder.cleanup()
    up._pages.close()


async def test_no_death_is_announced_while_the_nats_server_is_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("services.launcher.up.NOTICE_S", 0.1)
    with socket.socket() as taken:  # bound, and nothing listens
        taken.bind(("127.0.0.1", 0))
        note = HeartbeatNote(1, 1, "ready", 1.0, 0.0, "executor.e", 5)
        await announce_death(f"nats://127.0.0.1:{taken.getsockname()[1]}", load().settings, note)
    assert capsys.readouterr() == ("", "")


async def test_own_connection_is_closed_before_a_failed_start_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop would cancel the end of the connection, and print what that raises below the reason."""
    (tmp_path / "a.gguf").touch()
    settings = load(flags={"http": "off", "durable": False}).settings
    up = _Up(settings, {"a": str(tmp_path / "a.gguf")}, None, _Logins("nats://n:1"))
    connected = []

    async def wait_for_services() -> None:
        connected.append(True)
        try:
            up._supervisor.first_failure.set_result("executor ended with status 1")
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            connected.clear()

    monkeypatch.setattr(up, "_become_ready", wait_for_services)
    monkeypatch.setattr(up._supervisor, "start", lambda **more: None)
    monkeypatch.setattr("services.launcher.up.usable_cores", lambda: 64)
    with pytest.raises(SetupError, match="executor ended with status 1 before the server was ready"):
        await up.run()
    assert not connected


async def test_an_idle_fleet_drains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.gguf").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    settings = load(flags={"http": "off", "durable": False}).settings
    up = _Up(
        settings, {"a": str(tmp_path / "a.gguf")}, None, _Logins("nats://n:1"), flags=Flags(until_idle=True)
    )

    async def at_once(*_: str) -> None: ...

    for name in ("_become_ready", "_serve", "_idle"):
        monkeypatch.setattr(up, name, at_once)
    monkeypatch.setattr(up._supervisor, "start", lambda **more: None)
    assert await up.run() == 0
    assert capsys.readouterr().out.endswith("stopped\n")


def test_a_wrong_file_of_webhooks_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts, model = tmp_path / "hosts", tmp_path / "a.gguf"
    hosts.write_text("hooks.example.com\n")
    model.touch()

    def start(**more: object) -> None:
        raise AssertionError("a nats-server is to be started")

    monkeypatch.setattr("services.launcher.up.nats_server.start_by_default", start)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    given = {"http": "off", "durable": True, "webhooks": str(hosts), "model": str(model)}
    with pytest.raises(SetupError, match="hosts cannot be used: line 1: a secret is expected after the host"):
        start_up(load(flags=given).settings)


START = """
import select
import signal
from services.launcher import cli, nats_server
from services.launcher.own_folder import OwnFolder

def start(**more):
    folder = OwnFolder()
    print(folder.name, flush=True)
    while True:  # a signal just before a wait without an end would be lost
        select.select([], [], [], 0.1)

nats_server.start_by_default = start
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and up leaves it so
raise SystemExit(cli.main())
"""


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_during_its_start_leaves_no_folder(number: signal.Signals, tmp_path: Path) -> None:
    model = tmp_path / "a.gguf"
    model.touch()
    command = [sys.executable, "-c", START, "up", "--http", "off", "--no-durable", "--model", str(model)]
    env = {**os.environ, "TMPDIR": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as starting:
        assert starting.stdout is not None
        assert starting.stdout.readline().startswith(str(tmp_path))
        starting.send_signal(number)
        assert starting.wait() == 130
    assert [*tmp_path.glob("headrace-run-*"), *tmp_path.rglob("*.up")] == []


LOST = """
import os
import signal
from unittest import mock
from services.launcher import cli, nats_server

def start(**more):
    os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))
    if os.fork() == 0:
        os._exit(0)
    return mock.Mock(url="nats://127.0.0.1:1")

nats_server.start_by_default = start
raise SystemExit(cli.main())
"""


def test_a_signal_inside_a_callback_of_a_fork_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    flags = ["--http", "off", "--no-durable", "--model", str(tmp_path / "a.gguf")]
    env = {**os.environ, "TMPDIR": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    command = [sys.executable, "-c", LOST, "up", *flags]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 130, done.stderr
    assert "KeyboardInterrupt" in done.stderr, "it came where it is ignored"


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (BlockingIOError(11, "no fork"), r"can be started \(\[Errno 11\] no fork\): .* \(ulimit -u\)"),
        (
            RuntimeError("can't start new thread"),
            r"can be started \(can't start new thread\): .* \(ulimit -u\)",
        ),
    ],
)
def test_the_limit_of_processes_is_named(
    error: Exception, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(**more: object) -> None:
        raise error

    (tmp_path / "a.gguf").touch()
    monkeypatch.setattr("services.launcher.up.nats_server.start_by_default", start)
    given = {"http": "off", "durable": False, "model": str(tmp_path / "a.gguf")}
    with pytest.raises(SetupError, match=shown):
        start_up(load(flags=given).settings)


def answer(bus: Bus, status: dict[str, str], asked: Delivery) -> None:
    bus.publish(asked.reply, to_json(status))


@pytest.mark.parametrize(("kinds", "dtype"), [(("tokenizer", "executor"), "bf16"), (("tokenizer",), "")])
async def test_dtype_comes_from_an_executor(kinds: tuple[str, ...], dtype: str) -> None:
    broker = MemoryBroker()
    for kind in kinds:
        bus = broker.connect()
        status = {"kind": kind} | ({"dtype": "bf16"} if kind == "executor" else {})

        await bus.subscribe(subjects.STATUS, partial(answer, bus, status))
    assert await Readiness(broker.connect(), "f").dtype() == dtype
