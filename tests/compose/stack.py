"""One `docker compose up` for the checks of a run: on ports of its own, under a project name of its own."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODEL = "smollm2-135m-instruct"
KINDS = ("tokenizer", "scheduler", "executor", "kv_offload", "detokenizer", "gateway", "keeper")
READY_S = 600  # far above what it takes: a guard against hanging
DRAIN_S = 240  # likewise, and below the limit of a wait for a drain


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 without a listener, of those that no connection is given by itself."""
    candidates = random.sample(range(20_000, 32_000), 50 * count)
    return [port for port in candidates if _is_free(port)][:count]


def _is_free(port: int) -> bool:
    with closing(socket.socket()) as tried:
        return tried.connect_ex(("127.0.0.1", port)) != 0


@dataclass
class Stack:
    """The project of this run."""

    services: Sequence[str]
    project: str = f"headrace-check-{os.getpid()}"
    env: dict[str, str] = field(default_factory=dict)
    urls: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = ("NATS_PORT", "NATS_MONITOR_PORT", "HTTP_PORT", "PROMETHEUS_PORT")
        ports = {name: str(port) for name, port in zip(names, free_ports(len(names)), strict=True)}
        # no Jaeger can be had everywhere, threads that spin starve a busy machine, which then drains late
        quiet = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "", "HEADRACE_THREADS": "1"}
        quiet["HEADRACE_DRAIN_TIMEOUT_S"] = str(DRAIN_S)
        files = {"COMPOSE_FILE": "compose.yaml:tests/compose/often.yaml"}
        self.env = {**os.environ, **quiet, **files, **ports}

    def compose(self, *args: str, check: bool = True, timeout: float = READY_S) -> str:
        """`docker compose …`; its stdout. Fails with its stderr."""
        done = subprocess.run(
            ["docker", "compose", "-p", self.project, *args],
            cwd=ROOT,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert not check or done.returncode == 0, f"{args}: {done.stderr[-3000:]}\n{done.stdout[-1000:]}"
        return done.stdout

    def up(self, *args: str) -> None:
        """Start what is not there, and wait until every service is healthy."""
        self.compose("up", "-d", "--wait", "--wait-timeout", str(READY_S), *args, *self.services)

    def down(self) -> None:
        """Remove everything."""
        self.compose("--profile", "*", "down", "-v", "--remove-orphans", "--timeout", "60")

    def cli(self, *args: str) -> str:
        """A headrace command in a container of its own."""
        return self.compose("run", "--rm", "-T", "--no-deps", "cli", *args)

    def nats_url(self, name: str = "public") -> str:
        """The URL with a user's credentials, from this machine."""
        if name not in self.urls:
            server = f"nats://127.0.0.1:{self.env['NATS_PORT']}"
            self.urls[name] = self.cli("auth", "/auth", "--show", name, "--nats-url", server).strip()
        return self.urls[name]

    def api_key(self) -> str:
        """The key of the tenant `public`."""
        cat = ("run", "--rm", "-T", "--no-deps", "--entrypoint", "cat", "cli")
        return self.compose(*cat, "/auth/tenants/public/api_key").strip()

    def status(self) -> list[dict[str, Any]]:
        """The status of every service."""
        return list(json.loads(self.cli("status", "--json"))["services"])

    def containers(self, service: str) -> list[str]:
        """Ids of the running containers of a service."""
        return self.compose("ps", "-q", service).split()

    def kill(self, service: str, most: int | None = None) -> None:
        """SIGKILL the processes of a service, of at most so many containers, as a fault would and not by the
        engine, which then lets it be."""
        for container in self.containers(service)[:most]:
            os.kill(int(inspect(container, "{{.State.Pid}}")), signal.SIGKILL)

    def hang(self, service: str) -> None:
        """Stop (SIGSTOP) what the init of each container of a service runs."""
        for container in self.containers(service):
            init = inspect(container, "{{.State.Pid}}")
            for pid in Path(f"/proc/{init}/task/{init}/children").read_text().split():
                os.kill(int(pid), signal.SIGSTOP)

    def left(self) -> str:
        """Containers, volumes and networks of this project, as the engine lists them."""
        label = f"label=com.docker.compose.project={self.project}"
        lists = (["ps", "-aq"], ["volume", "ls", "-q"], ["network", "ls", "-q"])
        return "".join(docker(*words, "--filter", label) for words in lists)


def docker(*args: str) -> str:
    """`docker …`; its stdout."""
    return subprocess.run(
        ["docker", *args], capture_output=True, text=True, timeout=READY_S, check=True
    ).stdout


def healthy(container: str) -> bool:
    """Whether the probe of this container succeeds, asked now and not when the engine next asks."""
    probe = json.loads(inspect(container, "{{json .Config.Healthcheck.Test}}"))
    assert probe[0] == "CMD", probe
    done = subprocess.run(["docker", "exec", container, *probe[1:]], capture_output=True, check=False)
    return done.returncode == 0


def inspect(container: str, what: str) -> str:
    """One fact about a container."""
    return docker("inspect", "-f", what, container).strip()
