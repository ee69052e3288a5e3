"""The check of the nats-server in compose.yaml, run beside a real server: one that hangs is killed."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from support.source_tree import ROOT

from services.launcher import nats_server as servers
from services.launcher.nats_server import NatsServer

Check = Callable[[], int]


@pytest.fixture
def server() -> Iterator[NatsServer]:
    server = servers.start()
    yield server
    server.process.send_signal(signal.SIGCONT)
    server.stop()


@pytest.fixture
def check(server: NatsServer, tmp_path: Path) -> Check:
    """Runs it as if the server were all that its container's init runs."""
    *words, script = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["nats"]["healthcheck"][
        "test"
    ]
    assert words == ["CMD", "sh", "-c"]
    (tmp_path / "children").write_text(f"{server.process.pid} ")
    for here, there in (
        ("$$", "$"),
        ("/proc/1/task/1/children", str(tmp_path / "children")),
        ("/tmp/missed", str(tmp_path / "missed")),
        ("http://127.0.0.1:8222", server.monitoring_url),
        ("timeout 4", "timeout 0.5"),
    ):
        assert here in script
        script = script.replace(here, there)
    return lambda: subprocess.run(["sh", "-c", script], check=False, timeout=60).returncode


def test_a_server_that_hangs_is_killed_and_one_that_is_late_is_not(
    check: Check, server: NatsServer, tmp_path: Path
) -> None:
    missed = tmp_path / "missed"
    assert (check(), missed.exists()) == (0, False)
    server.process.send_signal(signal.SIGSTOP)
    assert (check(), check(), server.process.poll()) == (1, 1, None), "the second miss comes too soon"
    used, since = missed.read_text().split()
    missed.write_text(f"{int(used) - 1} {int(since) - 60}\n")
    assert (check(), server.process.poll()) == (1, None), "it has worked since"
    server.process.send_signal(signal.SIGCONT)
    while check():
        pass
    assert not missed.exists()
    server.process.send_signal(signal.SIGSTOP)
    assert (check(), server.process.poll()) == (1, None), "the misses before were forgiven"
    used, since = missed.read_text().split()
    missed.write_text(f"{used} {int(since) - 10}\n")
    assert check() == 1
    assert server.process.wait(30) == -signal.SIGKILL
