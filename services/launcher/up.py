"""`headrace up` runs a nats-server and every service as processes of this machine until a signal arrives.

`_Up` is one run: it starts the services, waits until they answer a request, then waits for the first signal
and drains. A second signal kills. A nats-server or a service that ends or hangs is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from services.launcher import (
    background,
    console,
    credentials,
    joining,
    leaf,
    nats_server,
    own_folder,
    session,
    supervisor,
)
from services.launcher.console import ServiceLines, print_line
from services.launcher.fork_server import UNBUFFERED, ForkServer
from services.launcher.heartbeats import HANGS_S, HeartbeatNote, SilenceTimers, Watch, ticks_of
from services.launcher.joining import Joined
from services.launcher.nats_server import NatsServer, ServerLimits
from services.launcher.own_folder import LogFiles, OwnFolder
from services.launcher.serve import KINDS, check_settings
from services.launcher.session import RunState
from shared import codec
from shared.actor.membership import Peers, missing
from shared.actor.process import FORCED
from shared.client.client import PROBE, Client, probe, request_all
from shared.clock import SystemClock, end_task
from shared.config import Settings
from shared.errors import BadRequest, HeadraceError, SetupError, WireError
from shared.messages import Heartbeat
from shared.nats import access, subjects
from shared.nats.interface import Bus, Delivery
from shared.processes import UnixListener, bind, http_url, unix_url, usable_cores, with_import_path
from shared.telemetry.counters import GatewayCounter
from shared.telemetry.metrics import ScrapeTargets
from shared.vocab.files import resolve, size_bytes

if TYPE_CHECKING:
    from shared.nats.bus import NatsBus

SHARED = (
    "gateway",
    "kv_offload",
    "keeper",
)  # shared by all models; a process of another kind serves one model
AGENTS = {  # for operators: loads, sleeps and wakes of the models here
    "models": "services.launcher.host_agent:HostAgent",
}
_FEW_CORES = 4
_FIRST_ANSWER_S = 0.5  # from ready to the start of the rest: a first request gets all cores
_TEXT = ("tokenizer", "detokenizer")
_EDGE = ("gateway", "tokenizer")  # drain together: one must not accept requests that the other refuses
DRAIN_ORDER = (_EDGE, *((kind,) for kind in KINDS if kind not in _EDGE))

REPORT_EVERY_S = 10.0
STATUS_S = 0.3
NOTICE_S = 2.0  # to publish the death of a service: later three heartbeats are missing
MONITORING_WAIT_S = 1.5  # a healthy nats-server answers its monitoring port within this time
CONNECT_S = 5.0  # to a nats-server on another continent
OWN_CONNECT_S = 60.0  # to that of `up`, which runs, however busy the machine is


@dataclass(frozen=True, slots=True)
class Flags:
    """What `up` is asked for beside its settings. Edges connect at `leaves`, HOST:PORT. With `join`, a URL,
    it adds executors and a kv_offload to the fleet there (see joining.py). `schedulers`: of each model.
    With `until_idle` it ends by itself (see background.py)."""

    leaves: str = ""
    join: str = ""
    schedulers: int = 1
    until_idle: bool = False


def up(
    settings: Settings,
    users: Path | None = None,
    more: Sequence[str] = (),
    flags: Flags = Flags(),
    *,
    must_be_durable: bool = True,
    forks: ForkServer | None = None,
) -> int:
    """Run until a signal. Exit status: 0 after a drain on SIGTERM, 130 after Ctrl-C, 1 on failure. With
    `users`, a folder made by `headrace auth`, each service has its own credentials, and HTTP requires an API
    key. `more` names models to serve in addition to that of the settings. Unless it `must_be_durable`, it
    runs without durable requests where their folder cannot be had, or with a server of others. `forks`: what
    starts the services, if it was started ahead."""
    noted, leaves, join = _note_signals(), flags.leaves, flags.join
    if join:
        settings = settings.model_copy(update={"nats_url": join, "http": "off", "durable": False})
    elif users is not None and not settings.http_keys:
        settings = settings.model_copy(update={"http_keys": str(credentials.keys_of(users))})
    if (settings.leaf or leaves) and (settings.nats_url or (settings.leaf and leaves)):
        raise SetupError(
            "--leaf and --leaves are of the server that `up` starts, without --nats-url: use one"
        )
    models = served_models(settings, more)
    check_settings(settings)
    if flags.schedulers > 1 and settings.event_log not in ("", "nats"):
        raise SetupError("an event log in a file is for one scheduler: use --event-log nats with several")
    address = settings.http_address  # fail on a taken one before anything starts
    if isinstance(address, str):
        unix = UnixListener(address)
        unix.remove()
        unix.socket.close()
    elif address is not None:
        try:
            bound = bind(*address)
        except SetupError as error:
            raise session.beside(error, settings, address[1]) from None
        if settings.gateways > 1:  # all gateways share the port that is free now
            http = f"{settings.http.rpartition(':')[0]}:{bound.getsockname()[1]}"
            settings = settings.model_copy(update={"http": http})
        bound.close()
    own_folder.sweep()
    with _no_process_named(), ExitStack() as stack:
        server = None
        if not settings.nats_url:
            extra = credentials.authorization(users, settings.fleet) if users else ""
            extra += leaf.listen(leaves, users) if leaves else ""
            limits = _durable_limits(settings, must_be_durable=must_be_durable)
            settings = settings.model_copy(update={"durable": limits is not None})
            if settings.leaf:
                names = (*models, *settings.model_names[1:])
                account = credentials.account_of(users)
                extra += leaf.remote(settings.leaf, names, has_users=bool(users), account=account)
                limits = leaf.limits_of(settings.fleet, limits)
            if port := settings.port:
                try:
                    server = nats_server.start(port, limits=limits, extra=extra)
                except SetupError as error:
                    raise session.beside(error, settings, port) from None
            else:
                server = nats_server.start_by_default(limits=limits, extra=extra)
            stack.callback(server.stop)
        elif not must_be_durable:
            settings = settings.model_copy(update={"durable": False})
        logins = _Logins(server.url if server else settings.nats_url, users)
        joined = asyncio.run(_look(logins.url_of("executor"), settings, [*models])) if join else None
        if noted:
            raise KeyboardInterrupt

        async def run() -> int:  # in the loop of what it makes
            return await _Up(settings, models, server, logins, joined, flags, forks).run()

        return asyncio.run(run())


def _note_signals() -> list[int]:
    """The signals that come from now on. Each also interrupts, but Python drops an interrupt that is raised
    inside a callback of a fork."""
    noted: list[int] = []

    def note(number: int, _frame: object) -> None:
        noted.append(number)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) == signal.SIG_DFL:  # not under nohup
            signal.signal(number, note)
    return noted


@contextlib.contextmanager
def _no_process_named() -> Iterator[None]:
    """Raise SetupError where no further process or thread may be started."""
    try:
        yield
    except (BlockingIOError, RuntimeError) as error:  # of a fork; of a thread
        if isinstance(error, RuntimeError) and "start new thread" not in str(error):
            raise
        cure = "raise the limit of this user's processes (ulimit -u), or end others"
        raise SetupError(f"no further process or thread can be started ({error}): {cure}") from None


async def _look(url: str, settings: Settings, models: Sequence[str]) -> Joined:
    """Whether the fleet at `url` takes executors of these settings. Raises SetupError if not."""
    async with session.connected(url, CONNECT_S) as bus:
        readiness = Readiness(bus, settings.fleet)
        peers = await readiness.until(
            lambda peers: joining.is_fleet_answering(peers, models), joining.FLEET_ANSWER_S
        )
        return joining.checked_fleet(peers, settings, models, access.shown(url))


def _durable_limits(settings: Settings, *, must_be_durable: bool) -> ServerLimits | None:
    """The limits of a server that keeps durable requests; None: it keeps none. Raises SetupError."""
    if not settings.durable:
        return None
    runs = session.read(session.path_for(settings)) is not None  # and holds the folder for as long
    try:
        return nats_server.durable_limits(settings.fleet, 0.0 if runs else nats_server.HELD_S)
    except SetupError as error:
        if must_be_durable:
            raise
        print_line(f"durable requests are off: {error.message}")
        return None


@dataclass(frozen=True, slots=True)
class _Logins:
    """The server's URL and the credentials of its users."""

    url: str
    users: Path | None = None

    def url_of(self, name: str) -> str:
        """The URL for a service or the operator. Raises SetupError."""
        return credentials.url_of(self.users, name, self.url) if self.users else self.url

    def of_commands(self, joined: Joined | None) -> str:
        """The URL for this command and for others on this machine. A host that joins a fleet may have the
        credentials of its own services alone. Raises SetupError."""
        return self.url_of("executor" if joined is not None and not self.can_operate else access.OPERATOR)

    @property
    def can_operate(self) -> bool:
        """Whether this machine has the credentials of the operator, or none are needed."""
        return self.users is None or (self.users / access.OPERATOR).exists()


def served_models(settings: Settings, more: Sequence[str] = ()) -> dict[str, str]:
    """The models by their served names. Raises SetupError if a model is not on this machine, if two have the
    same name, or if several models are given with a setting that fits only one."""
    event_file = "" if settings.event_log == "nats" else settings.event_log
    of_one = {
        "model_name": settings.model_name, "model_digest": settings.model_digest, "event_log": event_file,
    }  # fmt: skip
    if more and (given := [name for name, value in of_one.items() if value]):
        raise SetupError(f"{given[0]} is for one model: leave it out with several")
    found: dict[str, str] = {}
    if settings.leaf and settings.model == leaf.NO_MODEL:
        return found
    for model in (settings.model, *more):
        _check_model(settings, model)
        name, *_ = settings.model_names or (resolve(model, settings.cache_dir).name,)
        if name in found:
            raise SetupError(f"{found[name]} and {model} would both be served as {name!r}: rename one")
        found[name] = model
    return found


class _Up:
    """One run: services, readiness, signals."""

    def __init__(
        self,
        settings: Settings,
        models: Mapping[str, str],
        server: NatsServer | None,
        logins: _Logins,
        joined: Joined | None = None,
        flags: Flags = Flags(),
        forks: ForkServer | None = None,
    ) -> None:
        """`models` by name; the first is that of the settings. An edge may have none."""
        self._flags, self._forks = flags, forks
        self._settings = settings
        self._models = models
        self._server = server
        self._logins = logins
        self._joined = joined
        self._url = logins.of_commands(joined)
        self._http = ""  # URL of the gateway
        self._curl = ""  # a command for its Unix socket
        self._contexts: dict[str, str] = {}  # by model
        self._answers: dict[str, str] = {}  # by model: the field of a request with which it answers
        self._same_seed = ""  # whether a seed repeats an answer, in words
        self._started_at = time.monotonic()
        self._signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
        self._folder = OwnFolder()
        self._watch = Watch(self._folder.name)
        self._notices: set[asyncio.Task[None]] = set()
        self._supervisor = self._make_supervisor()
        self._supervisor.on_end = self._on_end
        self._executors = {name: self._executors_of(name) for name in models}
        if settings.awake_gib:
            for agent in AGENTS.values():
                resolve_name(agent).share(self._executors, int(settings.awake_gib * 1024))

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                loop.add_signal_handler(number, self._signals.put_nowait, number)
        few_cores = usable_cores() <= _FEW_CORES and self._settings.backend != "sim"
        specs = [service.spec for service in self._supervisor.services]
        if few_cores:
            in_turn = loop.create_task(self._supervisor.start_in_turn(without=starts_later(specs)))
        else:
            self._supervisor.start()
        note = session.path_for(self._settings)
        async with AsyncExitStack() as stack:
            stack.callback(self._folder.cleanup)
            stack.callback(self._pages.close)
            stack.push_async_callback(self._supervisor.kill)
            for path in (note, session.own_note(note)):
                stack.callback(session.remove, path, os.getpid())
            with contextlib.suppress(OSError):  # `_write_run_state` reports it
                self._note(ready=False).write(session.own_note(note))
            stack.callback(loop.create_task(self._supervisor.watch(self._watch.silent_s)).cancel)
            if few_cores:
                stack.callback(in_turn.cancel)
            if self._server is not None:
                stack.callback(loop.create_task(keep_running(self._server, print_line)).cancel)
                stack.callback(loop.create_task(watch_server(self._server, print_line)).cancel)
            signalled = loop.create_task(self._signals.get())
            ready = loop.create_task(self._become_ready())
            failed = self._supervisor.first_failure
            any_of: set[asyncio.Future[Any]] = {signalled, ready, failed}
            await asyncio.wait(any_of, return_when=asyncio.FIRST_COMPLETED)
            if not signalled.done():
                if not ready.done():
                    await end_task(ready)  # its connection closes while the loop still runs
                    raise SetupError(f"{failed.result()} before the server was ready: see its last log lines")
                await ready
                self._write_run_state()
                if self._logins.can_operate:  # others may not ask for loads
                    for agent in AGENTS.values():
                        stack.callback(loop.create_task(self._serve(agent)).cancel)
                stack.callback(loop.call_later(_FIRST_ANSWER_S, self._supervisor.start).cancel)
                if self._flags.until_idle:
                    idle = loop.create_task(self._idle())
                    stack.callback(idle.cancel)
                    await asyncio.wait({signalled, idle}, return_when=asyncio.FIRST_COMPLETED)
                else:
                    await signalled
            ready.cancel()
            first = signalled.result() if signalled.done() else signal.SIGTERM
            signalled.cancel()
            return await self._wind_down(first)

    def _make_supervisor(self) -> supervisor.Supervisor:
        s = self._settings
        counts = {
            "gateway": s.gateways if s.http_address is not None else 0,
            "keeper": int(s.durable),
            "kv_offload": int(bool(self._models)),
            "tokenizer": s.tokenizers,
            "scheduler": self._flags.schedulers,
            "executor": s.executors,
            "detokenizer": s.detokenizers,
        }
        kinds = KINDS if self._joined is None else joining.JOINING_KINDS
        specs = supervisor.service_specs({kind: counts.get(kind, 1) for kind in SHARED if kind in kinds})
        of_model = {kind: counts.get(kind, 1) for kind in kinds if kind not in SHARED}
        for name, model in self._models.items():
            suffix, own = f"@{name}" if len(self._models) > 1 else "", {"HEADRACE_MODEL": model}
            own["HEADRACE_EXECUTORS"] = str(s.executors * len(self._models))  # that share L1
            if self._joined is not None:
                own["HEADRACE_MODEL_DIGEST"] = s.model_digest or self._joined.digests[name]
            specs += supervisor.service_specs(of_model, suffix, own)
        specs.sort(key=lambda spec: KINDS.index(spec.kind))
        device, ranks = s.device_and_ranks
        if device != "cpu" and s.backend != "sim":
            specs = joining.placed(specs, ranks, joining.seen(os.environ))
        self._pages = ScrapeTargets(os.environ, [spec.name for spec in specs])
        specs = [
            replace(s, argv=(*s.argv, "--heartbeats", self._watch.path(s.name)), env=self._env_of(s))
            for s in specs
        ]
        env = with_import_path({**os.environ, **s.to_env(), **UNBUFFERED})
        env["HEADRACE_LEAF"] = access.shown(s.leaf)  # no service needs the password
        env["HEADRACE_AWAITED_MODELS"] = ",".join(self._models)
        names = [spec.name for spec in specs]
        shown, kept = ServiceLines(names, sys.stderr, bare=s.log_json), LogFiles(self._folder.name, names)
        if self._server is not None:
            kept.add("nats-server", self._server.log)

        def log_line(name: str, line: str) -> None:
            shown(name, line)
            kept(name, line)

        return supervisor.Supervisor(specs, env, log_line, self._forks)

    def _on_end(self, spec: supervisor.ServiceSpec, pid: int) -> None:
        if (note := self._watch.unannounced(spec.name, pid)) is not None:
            task = asyncio.create_task(announce_death(spec.env["HEADRACE_NATS_URL"], self._settings, note))
            self._notices.add(task)
            task.add_done_callback(self._notices.discard)

    def _executors_of(self, name: str) -> supervisor.ExecutorProcesses:
        model, settings = self._models[name], self._settings
        services = [
            service
            for service in self._supervisor.services
            if service.spec.kind == "executor" and service.spec.env["HEADRACE_MODEL"] == model
        ]
        weights = 0 if settings.backend == "sim" else size_bytes(resolve(model, settings.cache_dir))
        return supervisor.ExecutorProcesses(self._supervisor, services, len(services) * weights >> 20)

    async def _serve(self, name: str) -> None:
        """Run an agent until cancelled."""
        bus = await self._connect()
        try:
            s = self._settings
            awake_mib = int(s.awake_gib * 1024)
            clock = SystemClock()
            agent = resolve_name(name)(bus, s.fleet, s.host_id, self._executors, awake_mib, clock, print_line)
            await agent.run()
        finally:
            await bus.drain()

    def _env_of(self, spec: supervisor.ServiceSpec) -> dict[str, str]:
        page = self._pages.variables(spec.name)
        own = {"HEADRACE_NATS_URL": self._logins.url_of(spec.kind), **self._classes_of(spec)}
        if spec.kind == "keeper" and self._settings.leaf:  # an edge forwards requests for other models
            own["HEADRACE_MODEL_NAME"] = ",".join((*self._models, *self._settings.model_names[1:]))
        return {**spec.env, **own, **page}

    def _classes_of(self, spec: supervisor.ServiceSpec) -> dict[str, str]:
        """The setting with the classes that tenants may use, for a tokenizer with credentials."""
        if spec.kind != "tokenizer" or self._logins.users is None or self._settings.tenant_classes:
            return {}
        path = self._logins.users / "tokenizer" / credentials.CLASSES
        return {"HEADRACE_TENANT_CLASSES": str(path.resolve())} if path.exists() else {}

    async def _connect(self) -> NatsBus:
        # Imported after the services have been started: the import takes longer than the nats-server's start.
        from shared.nats.bus import NatsBus

        timeout_s = CONNECT_S if self._server is None else OWN_CONNECT_S
        return await NatsBus.connect(self._url, name="headrace-up", timeout_s=timeout_s)

    async def _become_ready(self) -> None:
        bus = await self._connect()
        try:
            readiness = Readiness(bus, self._settings.fleet)
            if self._joined is not None:
                await self._await_welcome(readiness, self._joined)
                return
            here = [name for name, executors in self._executors.items() if not executors.is_left_out]
            self._answers = await readiness.wait(here, print_line)
            self._contexts = {model: readiness.context(model) for model in self._models}
            dtype = await readiness.dtype() if self._models else ""
            self._same_seed = same_seed(dtype, deterministic=self._settings.deterministic)
            if (address := self._settings.http_address) is not None:
                port, tls = await readiness.gateway_port(print_line), bool(self._settings.http_tls_cert)
                if isinstance(address, str):
                    self._http = unix_url(address, tls=tls)
                    self._curl = (
                        f"curl --unix-socket {shlex.quote(address)} http{'s' * tls}://localhost/v1/models"
                    )
                else:
                    self._http = http_url(address[0], port, tls=tls)
        finally:
            await bus.drain()

    async def _await_welcome(self, readiness: Readiness, joined: Joined) -> None:
        """Return once the fleet uses all executors of this host."""
        wanted, host = self._settings.executors, self._settings.host_id

        def are_welcomed(peers: Peers) -> bool:
            return all(joined.welcomed(peers, model, host) == wanted for model in self._models)

        while not are_welcomed(await readiness.until(are_welcomed, REPORT_EVERY_S)):
            print_line("waiting for: a scheduler of the fleet that takes the executors of this host")
        self._contexts = {model: readiness.context(model) for model in self._models}

    async def _idle(self) -> None:
        bus = await self._connect()
        try:
            may_end = partial(background.retire, session.path_for(self._settings))
            await background.until_idle(bus, self._settings.fleet, self._settings.keep_alive_s, may_end)
        finally:
            await bus.drain()

    def _page_url(self) -> str:
        """The gateway's page, for the operator of this fleet: no browser sends the part after #."""
        if not self._http or self._curl:  # browsers open no Unix sockets
            return ""
        users = self._logins.users
        key = credentials.operator_key(users) if users is not None else ""
        return f"{self._http}/#key={key}" if key else f"{self._http}/"

    def _note(self, *, ready: bool) -> RunState:
        return RunState(
            pid=os.getpid(),
            fleet=self._settings.fleet,
            nats_url=self._url,
            monitoring_url=self._server.monitoring_url if self._server else "",
            models=[*self._models, *self._settings.model_names[1:]],
            page=self._page_url(),
            logs=self._folder.name,
            ready=ready,
        )

    def _write_run_state(self) -> None:
        note, path = self._note(ready=True), session.path_for(self._settings)
        try:
            note.write(session.own_note(path))
            if self._joined is None or session.read(path) is None:  # else the fleet has an `up` here, too
                note.write(path)
        except OSError as error:
            print_line(f"other commands need --nats-url {access.shown(self._url)}: no run file ({error})")
        contexts = self._contexts.items()
        rows = [
            *(row for model, context in contexts for row in (("model", model), ("context", context))),
            ("aliases", ", ".join(self._settings.model_names[1:])),
            ("NATS", access.shown(self._url)),
            ("monitoring", note.monitoring_url),
            *(("publish to", subjects.generate(subjects.DEFAULT_TENANT, model)) for model in self._models),
            ("joined as", f"host {self._settings.host_id}" if self._joined else ""),
            ("OpenAI API", f"{self._http}/v1" if self._http else ""),
            ("with curl", self._curl),
            ("page", f"{self._http}/" if self._page_url() else ""),
            ("API keys", self._settings.http_keys if self._http else ""),
            ("metrics", self._pages.shown()),
            ("same seed", self._same_seed),
            ("edge of", access.shown(self._settings.leaf)),
            ("durable in", self._server.limits.store if self._server else ""),
        ]
        for name, value in rows:
            if value:
                print_line(f"  {name + ':':<12}{console.bold(value)}")
        print_line(f"ready after {time.monotonic() - self._started_at:.1f} s")
        print_line(f"{self._example()}{console.dim('Ctrl-C drains')}")

    def _example(self) -> str:
        """What a user may try first; empty on a host that joined."""
        answers = {*self._answers.values()}
        if self._joined is not None or (self._answers and "messages" not in answers and not self._http):
            return ""
        if not answers or "messages" in answers:
            return 'try `headrace chat -q "What is NATS?"` in a second shell; '
        path, body = "completions", '{"prompt": "NATS is"}'
        if answers == {"input"}:
            path, body = "embeddings", '{"input": "What is NATS?"}'
        return f"try `curl {self._http}/v1/{path} --json '{body}'` in a second shell; "

    async def _wind_down(self, first: signal.Signals) -> int:
        """Drain the services; a second signal kills them. Returns the exit status."""
        print_line("draining: no new requests, running ones end; a second Ctrl-C kills")
        loop = asyncio.get_running_loop()
        drained = loop.create_task(
            self._supervisor.drain(DRAIN_ORDER, self._settings.drain_timeout_s, _countdown())
        )
        again = loop.create_task(self._signals.get())
        either: set[asyncio.Future[Any]] = {drained, again}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        forced = not drained.done()
        if forced:
            await self._supervisor.kill()
        again.cancel()
        clean = await drained
        late = "stopped: requests that did not end in time got an error"
        print_line("killed" if forced else "stopped" if clean else late)
        return FORCED if forced or first == signal.SIGINT else 0


async def announce_death(url: str, settings: Settings, note: HeartbeatNote) -> None:
    """Publish the heartbeat that a killed service could not, `failed`, with the login of its kind in `url`.
    Nothing is sent if the nats-server is away, too."""
    kind, _, actor = note.source.partition(".")
    every_us = settings.heartbeat_interval_ms * 1000
    last = Heartbeat(kind=kind, actor=actor, host_id=settings.host_id, state="failed", interval_us=every_us)
    data = codec.encode(codec.Envelope(note.source, note.epoch, 0, last))
    with contextlib.suppress(HeadraceError):
        async with session.connected(url, NOTICE_S) as bus:
            bus.publish(subjects.heartbeat(settings.fleet, kind, actor), data)


def starts_later(specs: Sequence[supervisor.ServiceSpec]) -> set[str]:
    """The services that start only after the server is ready on few cores, which the executor needs to load
    the model: kv_offload, whose import of LMCache for an L2 keeps a core busy for seconds, keeper, and every
    tokenizer and detokenizer of a model but the first."""
    first = {(spec.kind, spec.env.get("HEADRACE_MODEL")): spec.name for spec in reversed(specs)}
    later = ("kv_offload", "keeper", *_TEXT)
    return {s.name for s in specs if s.kind in later} - {
        name for (kind, _), name in first.items() if kind in _TEXT
    }


def _countdown() -> Callable[[int, str], None]:
    last = 0

    def report(left_s: int, kind: str) -> None:
        nonlocal last
        if last and left_s != last:  # no countdown within the first second
            print_line(f"draining: {kind} has {left_s} s left")
        last = left_s

    return report


def _check_model(settings: Settings, model: str) -> None:
    """Fetch the default model if it is missing. Raises SetupError if another model is missing."""
    from services.launcher.commands.pull import pull
    from shared.vocab.files import DEFAULT_MODEL

    try:
        resolve(model, settings.cache_dir)
    except SetupError:
        if model != DEFAULT_MODEL:
            raise
        print_line(f"the model {model} is not here yet: fetching it once")
        pull(model, settings.cache_dir, print_line)
        sys.stdout.flush()


async def keep_running(server: NatsServer, report: Callable[[str], None]) -> None:
    """Restart `server` on its ports each time it ends, with back-off, until cancelled. Use the main thread.
    The services reconnect and repair their streams: a restart delays the requests in flight and loses
    none."""
    loop, backoff_s = asyncio.get_running_loop(), supervisor.BACKOFF_FIRST_S
    while True:
        started_at = loop.time()
        what = supervisor.ended_how(await ended(server.process))
        if loop.time() - started_at > supervisor.HEALTHY_S:
            backoff_s = supervisor.BACKOFF_FIRST_S
        runs = False
        while not runs:
            report(f"nats-server {what}; starts again in {backoff_s:g} s")
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, supervisor.BACKOFF_LAST_S)
            try:
                server.restart()
                runs = True
            except (SetupError, OSError, subprocess.SubprocessError) as error:
                what = f"did not start ({error})"


async def watch_server(server: NatsServer, report: Callable[[str], None]) -> None:
    """Kill `server` when it hangs, or has space again after its disk was full, until cancelled;
    `keep_running` starts it again."""
    silences, disk = SilenceTimers(), nats_server.FullDisk(server.limits.store, report)
    while True:
        await asyncio.sleep(supervisor.HANG_POLL_S)
        pid = server.process.pid
        answer = await _health(server.monitoring_url)
        if disk.has_space_again(answer):
            server.process.terminate()
        ticks = None if answer else ticks_of(pid)
        silent_s = silences.seconds("", None if ticks is None else (pid, ticks), time.monotonic())
        if silent_s >= HANGS_S:
            report(f"nats-server has not answered for {silent_s:.0f} s and used no CPU: killed")
            server.process.kill()


async def _health(url: str) -> bytes:
    """What the nats-server with its monitoring at `url` answers within MONITORING_WAIT_S about itself."""
    where = urlsplit(url)
    with contextlib.suppress(OSError):
        async with asyncio.timeout(MONITORING_WAIT_S):
            reader, writer = await asyncio.open_connection(where.hostname, where.port)
            try:
                writer.write(b"GET /healthz HTTP/1.0\r\n\r\n")
                return await reader.read()
            finally:
                writer.close()
    return b""


async def ended(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end of a process. Returns its status. After a cancel, its thread still waits."""
    loop = asyncio.get_running_loop()
    status: asyncio.Future[int] = loop.create_future()

    def settle(value: int) -> None:
        if not status.done():
            status.set_result(value)

    def wait() -> None:
        value = process.wait()
        with contextlib.suppress(RuntimeError):  # the loop has closed
            loop.call_soon_threadsafe(settle, value)

    threading.Thread(target=wait, name="nats-server", daemon=True).start()
    return await status


def same_seed(dtype: str, *, deterministic: bool) -> str:
    """In words, whether a seed gives the same tokens again on an engine of this dtype; empty without one."""
    if deterministic:
        return "same tokens in any batch (deterministic)"
    if dtype in ("f32", "packed/f16", "packed8/f16"):
        return f"same tokens in any batch ({dtype.partition('/')[0]})"
    if dtype in ("", "none"):
        return ""
    return f"other requests may change the tokens ({dtype}), except with --deterministic"


class Readiness:
    """Waits until a fleet is ready: until a real request through NATS gets its first answer. A request is
    tried after each heartbeat, once every kind on its path has reported "ready". Nothing is polled."""

    def __init__(self, bus: Bus, fleet: str) -> None:
        self._bus = bus
        self._fleet = fleet
        self._peers = Peers()
        self._clock = SystemClock()
        self._heartbeat_came = asyncio.Event()
        self._listens = False

    async def until(self, enough: Callable[[Peers], bool], timeout_s: float) -> Peers:
        """The actors of the fleet, once they are `enough` or after `timeout_s`."""
        await self._listen()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not enough(self._peers):
                    self._heartbeat_came.clear()
                    await self._heartbeat_came.wait()
        return self._peers

    async def wait(self, models: Sequence[str], report: Callable[[str], None]) -> dict[str, str]:
        """Return once a request to each of `models` was answered, with its field (`client.probe`) by model.
        `report` gets what is still missing every REPORT_EVERY_S. Raises SetupError if its context is too
        short, else the request's error if it is not retryable."""
        await self._listen()
        client = await Client.open(self._bus)
        return {model: await self._answered(client, model, report) for model in models}

    async def _answered(self, client: Client, model: str, report: Callable[[str], None]) -> str:
        while True:
            while gone := missing(self._peers, model):
                await self._next_heartbeat(report, ", ".join(gone))
            try:
                return await probe(client, model)
            except BadRequest:
                await self._check_context(client, model)
                raise
            except HeadraceError as error:
                if not error.retryable:
                    raise
                await self._next_heartbeat(report, error.message)

    async def _check_context(self, client: Client, model: str) -> None:
        """Raise SetupError if the context holds no prompt like the probe's with an answer."""
        asked = await client.request(subjects.tokenize(subjects.PROBE_TENANT, model), PROBE)
        least, (known, real) = asked["count"] + 1, self._context(model)
        if real < least:
            cure = "max_context" if known < least else "kv_blocks times block_tokens"
            raise SetupError(
                f"a chat of one word and its answer take {least} tokens, and the context of {model} is "
                f"{real}: raise {cure} to {least} or more"
            )

    def _context(self, model: str) -> tuple[int, int]:
        """Tokens of the longest prompt with its answer: of the model, and with the KV cache of this fleet."""
        known = self._peers.max_load("tokenizer", "model_context", model)
        return known, min(self._peers.max_load("executor", "context", model) or known, known)

    def context(self, model: str) -> str:
        """The longest prompt with its answer, in words. Call it after `wait`."""
        known, real = self._context(model)
        why = f": the KV cache holds no more of the model's {known:,}, see kv_blocks" if real < known else ""
        return f"{real:,} tokens{why}"

    async def gateway_port(self, report: Callable[[str], None]) -> int:
        """The HTTP port of a gateway, once one is ready. Call it after `wait`."""
        while True:
            for actor in self._peers.ready("gateway"):
                peer = self._peers.get(f"gateway.{actor}")
                load = dict(peer.heartbeat.load) if peer is not None else {}
                if GatewayCounter.PORT.load in load:  # 0 on a Unix socket
                    return load[GatewayCounter.PORT.load]
            await self._next_heartbeat(report, "gateway")

    async def dtype(self) -> str:
        """The dtype in which an executor computes, empty if none reports one. Call it after `wait`."""
        found = await request_all(
            self._bus, subjects.STATUS, STATUS_S, enough=lambda status: status.get("dtype")
        )
        return next((str(status["dtype"]) for status in found if status.get("dtype")), "")

    async def _listen(self) -> None:
        if not self._listens:
            self._listens = True
            await self._bus.subscribe(subjects.heartbeat_all(self._fleet), self._on_heartbeat)
            self._bus.publish(subjects.heartbeat_request(self._fleet), b"")

    async def _next_heartbeat(self, report: Callable[[str], None], why: str) -> None:
        self._heartbeat_came.clear()
        while not self._heartbeat_came.is_set():
            try:
                async with asyncio.timeout(REPORT_EVERY_S):
                    await self._heartbeat_came.wait()
            except TimeoutError:
                report(f"waiting for: {why}")

    def _on_heartbeat(self, delivery: Delivery) -> None:
        try:
            envelope = codec.decode(delivery.data)
        except WireError:
            return  # a message of another version
        if isinstance(envelope.message, Heartbeat):
            self._peers.update(envelope.epoch, envelope.message, self._clock.now_us())
            self._heartbeat_came.set()
