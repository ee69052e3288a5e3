"""Runs the service processes of `headrace up`: starts them, restarts with back-off, drains in order.

A service is restarted until its own turn in the drain: services earlier in the order may still need it. A
service that hangs is killed and, unless it is draining, restarted. No child process outlives its parent
(`die_with_parent`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from services.launcher.fork_server import SERVE, Forked, ForkServer
from shared.processes import die_with_parent, oom_kills

BACKOFF_FIRST_S = 0.5
BACKOFF_LAST_S = 30.0
HEALTHY_S = 60.0  # a service that ran this long restarts its back-off at BACKOFF_FIRST_S
LINE_LIMIT_BYTES = 1024 * 1024
KILL_GRACE_S = 3.0  # after the drain's time limit, for the services to end by themselves
LAST_ERRORS_S = 0.6  # of it, for a group to send its clients errors, before the next group is stopped
LAST_LINES_S = 1.0  # to read the last log lines of an ended process from its pipe
LOG_WAIT_S = 2.0  # for a service to log that it is ready: it takes 0.6 s of one core
HANG_POLL_S = 1.0  # between two checks for services that hang

LogLine = Callable[[str, str], None]  # service name, line


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """One process to keep running."""

    name: str  # unique: scheduler, executor-0, executor-1, ...
    kind: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)  # added to the environment of all services


@dataclass(eq=False, slots=True)
class Service:
    """A supervised process. `ended` is set while no process runs; `leaving` once it must not be restarted."""

    spec: ServiceSpec
    process: asyncio.subprocess.Process | Forked | None = None
    restarts: int = 0
    cut_short: bool = False  # it hung during its drain and was killed
    killed: bool = False  # by us
    task: asyncio.Task[None] | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    logged: asyncio.Event = field(default_factory=asyncio.Event)  # its first line

    def __post_init__(self) -> None:
        self.ended.set()

    def dismiss(self, number: signal.Signals) -> None:
        """Signal the process and do not restart it after its end."""
        self.leaving.set()
        self.send(number)

    def send(self, number: signal.Signals) -> None:
        """Signal the process if it runs. `Process.send_signal` polls first (up to Python 3.12). The poll may
        reap a dead child before asyncio's watcher does, which then reports status 255."""
        self.killed |= number == signal.SIGKILL
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)


LOADED, ASLEEP, UNLOADED, CHANGING = "loaded", "asleep", "unloaded", "changing"  # states of a model here


class ExecutorProcesses:
    """The executors of one model."""

    def __init__(self, supervisor: Supervisor, services: Sequence[Service], least_mib: int) -> None:
        """`least_mib`: of memory, by the size of the model's files."""
        self._supervisor, self._services = supervisor, services
        self.least_mib = least_mib

    @property
    def is_running(self) -> bool:
        """Whether one runs, or is about to be started again."""
        return any(s.task is not None and not s.task.done() for s in self._services)

    @property
    def is_ending(self) -> bool:
        """Whether they run, and drain for their end."""
        return self.is_running and all(s.leaving.is_set() for s in self._services)

    @property
    def is_left_out(self) -> bool:
        """Whether `stop` came before the start, or they have ended after it."""
        return not self.is_running and all(s.leaving.is_set() for s in self._services)

    @property
    def restarts(self) -> int:
        return sum(s.restarts for s in self._services)

    def start(self) -> None:
        for service in self._services:
            self._supervisor.start_again(service)

    def stop(self) -> None:
        """Drain and end them; each limits its drain itself. Before a start: leave them out of it."""
        for service in self._services:
            service.dismiss(signal.SIGTERM)


class Supervisor:
    """Runs a list of services. Use it on the main thread: the services end with the thread that started them.
    `first_failure` resolves to the name and end of the first service that ended by itself. `on_end` is called
    with each process that has ended, but for those that the supervisor killed, before the next one starts."""

    def __init__(
        self,
        specs: Sequence[ServiceSpec],
        env: Mapping[str, str],
        log_line: LogLine,
        forks: ForkServer | None = None,
    ) -> None:
        """`forks`: None starts one with the first service."""
        self.services = [Service(spec) for spec in specs]
        self.first_failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._env = dict(env)
        self._log_line = log_line
        self.on_end: Callable[[ServiceSpec, int], None] = lambda _spec, _pid: None
        self._forks = forks

    def start(self, *, without: Collection[str] = ()) -> None:
        """Start every service that was not started or dismissed before, except those named in `without`."""
        for service in self.services:
            if service.task is None and not service.leaving.is_set() and service.spec.name not in without:
                service.task = asyncio.get_running_loop().create_task(self._keep_running(service))

    async def start_in_turn(self, *, without: Collection[str]) -> None:
        """`start` for few cores: executors at once, since they take the longest; beside them the others one
        by one, each after the first log line of the one before, or LOG_WAIT_S."""
        self.start(without={s.spec.name for s in self.services if s.spec.kind != "executor"})
        idle = (s for s in self.services if s.task is None and not s.leaving.is_set())
        waiting = {s.spec.name for s in idle} - {*without}
        for service in self.services:
            if service.spec.name in waiting:
                waiting.remove(service.spec.name)
                self.start(without=waiting | {*without})
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOG_WAIT_S):
                        await service.logged.wait()

    async def drain(
        self, order: Sequence[Collection[str]], timeout_s: float, report: Callable[[int, str], None]
    ) -> bool:
        """SIGTERM each group of kinds in turn, the next group after the one before has ended.

        After `timeout_s` the remaining groups get SIGINT, LAST_ERRORS_S apart, so that they send errors to
        their clients; processes that still run are then killed. `report` is called about once a second with
        the seconds left and the kinds that still run. True if every service ended by itself and in time.
        """
        loop = asyncio.get_running_loop()
        hurry_at = loop.time() + timeout_s
        clean = True
        for kinds in order:
            waiting = [s for s in self.services if s.spec.kind in kinds]
            for service in waiting:
                service.dismiss(signal.SIGTERM)
            while (left := hurry_at - loop.time()) > 0 and any(not s.ended.is_set() for s in waiting):
                late = {s.spec.kind: None for s in waiting if not s.ended.is_set()}
                report(max(0, round(left)), " and ".join(late))
                await _all_ended(waiting, min(1.0, left))
            if any(not s.ended.is_set() for s in waiting):
                clean = False
                for service in waiting:
                    service.dismiss(signal.SIGINT)  # a second SIGTERM may be merged with the first
                left_s = hurry_at + KILL_GRACE_S - loop.time()
                await _all_ended(waiting, max(0.0, min(LAST_ERRORS_S, left_s)))
        if not clean:
            await _all_ended(self.services, max(0.0, hurry_at + KILL_GRACE_S - loop.time()))
        await self.kill()
        return clean and not any(service.cut_short for service in self.services)

    def start_again(self, service: Service) -> None:
        """Start a service that has ended after `dismiss`, or was dismissed before its start."""
        if service.task is None or service.task.done():
            service.leaving.clear()
            service.task = asyncio.get_running_loop().create_task(self._keep_running(service))

    async def kill(self) -> None:
        """SIGKILL every process and wait for its end. A second call does nothing."""
        for service in self.services:
            service.dismiss(signal.SIGKILL)
        await asyncio.gather(*(s.task for s in self.services if s.task is not None))
        self._end_forks()

    def _end_forks(self) -> None:
        if self._forks is not None:
            self._forks.close()
            self._forks = None

    async def watch(self, silent_s: Callable[[str, int], float]) -> None:
        """Kill services that hang, until cancelled. `silent_s(name, pid)` is the number of seconds for which
        that process has been hanging, or 0."""
        while True:
            await asyncio.sleep(HANG_POLL_S)
            for service in self.services:
                if service.process is None or service.ended.is_set():
                    continue
                if hung_s := silent_s(service.spec.name, service.process.pid):
                    why = f"has sent no heartbeat for {hung_s:.0f} s and used no CPU: killed"
                    self._log_line(service.spec.name, why)
                    service.cut_short = service.leaving.is_set()
                    service.send(signal.SIGKILL)

    async def _keep_running(self, service: Service) -> None:
        backoff_s = BACKOFF_FIRST_S
        loop = asyncio.get_running_loop()
        while not service.leaving.is_set():
            started_at = loop.time()
            how = await self._run_once(service)
            if service.leaving.is_set():
                return
            if loop.time() - started_at > HEALTHY_S:
                backoff_s = BACKOFF_FIRST_S
            if not self.first_failure.done():
                self.first_failure.set_result(f"{service.spec.name} {how}")
            self._log_line(service.spec.name, f"{how}; starts again in {backoff_s:g} s")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff_s):
                    await service.leaving.wait()
            backoff_s = min(backoff_s * 2, BACKOFF_LAST_S)
            service.restarts += not service.leaving.is_set()

    async def _run_once(self, service: Service) -> str:
        """Start the process and wait for its end. Returns how it ended."""
        service.ended.clear()
        service.killed, before = False, oom_kills()
        try:
            status = await self._run_process(service)
            return ended_how(status) + ("" if service.killed else why_killed(status, oom_kills() - before))
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # no memory, process id, thread
            return f"did not start ({error})"
        finally:
            service.ended.set()

    async def _run_process(self, service: Service) -> int:
        """Wait for the process, then for its log lines: its children may hold the pipe open for longer."""
        loop, lines = asyncio.get_running_loop(), asyncio.StreamReader(LINE_LIMIT_BYTES)
        ours, theirs = os.pipe()
        pipe, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(lines), os.fdopen(ours, "rb", 0)
        )
        try:
            try:
                process = service.process = await self._spawn(service.spec, theirs)
            finally:
                os.close(theirs)
            if service.leaving.is_set():  # dismissed while the process was being created
                service.send(signal.SIGKILL)
            copying = loop.create_task(self._copy_lines(service, lines))
            status = await process.wait()
            if not service.killed:
                self.on_end(service.spec, process.pid)
            await asyncio.wait({copying}, timeout=LAST_LINES_S)
            if not copying.done():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)  # its children are of no use without it
                await asyncio.wait({copying}, timeout=LAST_LINES_S)
            pipe.close()
            await copying
            return status
        finally:
            pipe.close()

    async def _spawn(self, spec: ServiceSpec, stdout: int) -> asyncio.subprocess.Process | Forked:
        if sys.platform == "linux" and spec.argv[: len(SERVE)] == SERVE:
            try:
                forks = self._forks = self._forks or ForkServer(self._env)
                return await forks.start(spec.argv, {**self._env, **spec.env}, stdout)
            except OSError:  # it has ended, or there are too many processes
                self._end_forks()
        return await asyncio.create_subprocess_exec(
            *spec.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=stdout,
            stderr=asyncio.subprocess.STDOUT,
            env={**self._env, **spec.env},
            start_new_session=True,  # Ctrl-C must reach only the launcher, which drains in order
            preexec_fn=die_with_parent(signal.SIGKILL),  # without the launcher no drain is possible
        )

    async def _copy_lines(self, service: Service, stream: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # a line over the limit: the reader has dropped that part
                continue
            if not line:
                return
            self._log_line(service.spec.name, line.decode(errors="replace").rstrip())
            service.logged.set()


def service_specs(
    counts: Mapping[str, int], suffix: str = "", env: Mapping[str, str] | None = None
) -> list[ServiceSpec]:
    """The processes of a pipeline: `counts` of each kind, their names with `suffix`."""
    specs = []
    for kind, count in counts.items():
        for i in range(count):
            name = (kind if count == 1 else f"{kind}-{i}") + suffix
            argv = (*SERVE, kind, "--name", name)
            specs.append(ServiceSpec(name, kind, argv, env or {}))
    return specs


async def _all_ended(services: Sequence[Service], timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*(s.ended.wait() for s in services))


def ended_how(status: int) -> str:
    """An exit status in words."""
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def why_killed(status: int, kills: int) -> str:
    """A hint if others have killed the process, or a file that it had mapped, else nothing. `kills`: those of
    the kernel for memory since its start."""
    if status == -signal.SIGBUS:
        return " (a file that it had mapped, like a model's while it loads, was cut off or could not be read)"
    if status != -signal.SIGKILL:
        return ""
    if kills:
        return " (the kernel killed for memory: its oom_kill has risen, see `dmesg`)"
    return " (not by this command: perhaps by the kernel, for memory, see `dmesg`)"


def leave(status: int) -> int:
    """Return the exit status. If another thread still runs (an engine that loads), end the process here:
    native code must not run while the interpreter shuts down."""
    if threading.active_count() > 1:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status
