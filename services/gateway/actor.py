"""`GatewayActor` runs an HTTP server and a native client in one process.

uvicorn uses the runtime's event loop and handles no signals. The gateway opens the listening socket itself: a
port in use is a typed error, and socket options bound slow peers. The kernel buffers UNSENT_BYTES, and closes
the connection of a peer that is gone or reads nothing for STALL_MS. It does not for a Unix socket: there a
peer that reads nothing keeps its connection. connection.py bounds slow senders.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
from collections.abc import Collection, Iterator, Sequence

import uvicorn
from starlette.types import ASGIApp

from services.gateway.app import build_app
from services.gateway.connection import KEEP_ALIVE_S, SWEEP_S, Connection, sweep
from services.gateway.endpoints import Endpoints
from services.gateway.exchange import AccessLog
from services.gateway.native_call import Fleet, Health, TenantConnections
from services.gateway.visitors import Keys, Visitors
from shared.actor.mailbox import Mailbox
from shared.actor.membership import Peer
from shared.actor.runtime import Actor, HeartbeatPayload
from shared.aliases import STAMP, Aliases
from shared.client.client import Client
from shared.config import Settings, WatchedFile
from shared.errors import SetupError, drain_over
from shared.nats import access
from shared.processes import UnixListener, bind, http_url, unix_url
from shared.telemetry.counters import GatewayCounter, Metrics, in_load, in_status, lately

log = logging.getLogger("headrace.gateway")

Tls = WatchedFile[ssl.SSLContext]

BACKLOG = 2_048
MAX_FILES, FEW_FILES = 65_536, 1_024
STALL_MS = 30_000
UNSENT_BYTES = 262_144  # kernel buffer of a connection, by default up to 4 MB
START_US = 30_000_000  # for the first tokenizer of each model to come: requests wait for it
LEAVE_S = 0.5  # at a stop, for last messages to clients that read
_PROBES = ((15, "TCP_KEEPIDLE"), (5, "TCP_KEEPINTVL"), (3, "TCP_KEEPCNT"))


class GatewayActor(Actor):
    """One gateway process."""

    kind = "gateway"
    traced = True

    def __init__(
        self,
        address: tuple[str, int] | str,
        keys: Keys,
        timeout_s: float,
        *,
        shared: bool = False,
        tls: Tls | None = None,
        access_log: AccessLog | None = None,
        origins: Sequence[str] = (),
        awaited: Collection[str] = (),
        ping_s: float = 10.0,
    ) -> None:
        """`address`: host and port, or the path of a Unix socket. `shared`: other gateways listen on the same
        port. `awaited`: the models of this fleet, if they are known."""
        self._awaited = awaited
        self._origins = origins
        self._visitors = Visitors(origins, keys=keys.demanded)
        self._address = address
        self._tls = tls
        self._access_log = access_log
        self._shared = shared
        self._keys = keys
        self._timeout_s, self._ping_s = timeout_s, ping_s
        self._endpoints: Endpoints | None = None
        self._seen: set[str] = set()  # models of this fleet that have had a tokenizer

    async def start(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._aliases = Aliases(mailbox.clock.now_us)
        self._aliases.is_there = self._is_there
        await self._aliases.follow(mailbox.bus)
        await self._aliases.answer()
        client, until_us = await Client.open(mailbox.bus), mailbox.clock.now_us() + START_US
        client.awaited = lambda: mailbox.clock.now_us() < until_us and self._needs_tokenizer()
        fleet = Fleet(mailbox, lambda: self.metrics)
        self._endpoints = Endpoints(
            connections=TenantConnections(client, apart=self._keys.demanded),
            keys=self._keys,
            health=Health(client),
            fleet=fleet,
            timeout_s=self._timeout_s,
            ping_s=self._ping_s,
            model_of=self._model_of,
            component=mailbox.source,
            tracer=mailbox.tracer,
            access_log=self._access_log,
            clock=mailbox.clock,
        )
        at_all = None if isinstance(self._address, str) else self._visitors
        app = build_app(self._endpoints, self._origins, at_all)
        if isinstance(self._address, str):
            unix = UnixListener(self._address)
            self._http = HttpServer(app, unix.socket, self._tls, unix)
        else:
            self._http = HttpServer(app, listen(*self._address, shared=self._shared), self._tls)
        await self._http.start()
        self._look()

    def on_peer(self, peer: Peer) -> None:
        """An actor has come or gone. The requests that a dead tokenizer took with it are known to the other
        tokenizers. If there was no other, the first one that is back gets them again."""
        heartbeat = peer.heartbeat
        if heartbeat.kind == "tokenizer":
            self._seen.add(heartbeat.model)
        if (
            self._endpoints is not None
            and heartbeat.kind == "tokenizer"
            and heartbeat.state != "starting"  # it takes no request yet; the one that counts may be dead
            and heartbeat.model  # "" of one that has failed
            and len(self._mailbox.peers.ready("tokenizer", heartbeat.model)) == 1
        ):
            for name in (heartbeat.model, *heartbeat.aliases):
                self._endpoints.connections.resend_unanswered(name)
        self._look()

    on_peer_gone = on_peer

    def on_broker(self, online: bool) -> None:
        if self._endpoints is not None:
            self._endpoints.health.online = online
            self._endpoints.health.doubt("the nats-server was away just now")
            self._look()

    def upkeep(self) -> None:
        if self._endpoints is not None:
            self._aliases.catch_up(self._mailbox.peers.max_load("tokenizer", STAMP, ""))
            self._http.check()
            self._keys.refresh()
            if self._tls is not None:
                self._tls.refresh()
            self._endpoints.connections.sweep()
            self._look()

    def heartbeat_payload(self) -> HeartbeatPayload:
        if self._endpoints is None:
            return HeartbeatPayload()
        counted = {GatewayCounter.PORT: self._http.address[1], **self._endpoints.counters.counted}
        return HeartbeatPayload(load=in_load(counted), counts=lately(counted))

    @property
    def metrics(self) -> Metrics:
        return () if self._endpoints is None else self._endpoints.counters.metrics()

    def status(self) -> dict[str, object]:
        if self._endpoints is None:
            return {}
        return {
            "url": self._http.url,
            "health": self._endpoints.health.why or "ok",
            GatewayCounter.LINES.status: len(self._endpoints.connections),
            **in_status(self._endpoints.counters.counted),
        }

    def _model_of(self, name: str, tenant: str, request: str) -> str:
        """The model for a request to an alias, else the name as it is: that of an adapter, too. The name of a
        model goes first."""
        alias = self._aliases.get(name)
        if alias is None or alias.adapter is not None or self._mailbox.peers.has_model(name):
            return name
        return self._aliases.resolve(name, tenant, request) or name

    def _is_there(self, model: str) -> bool:
        """False for a model that was served and is not now. Those of other fleets are not seen here."""
        return model not in self._seen or model in self._mailbox.peers.models("tokenizer")

    def _needs_tokenizer(self) -> bool:
        there = self._mailbox.peers.models("tokenizer")
        return not there or not {*self._awaited} <= {*there}

    async def drain(self) -> None:
        if self._endpoints is not None:
            self._endpoints.health.stop()
            await self._http.drain()

    async def stop(self) -> None:
        if self._endpoints is not None:
            self._endpoints.health.stop()
            self._endpoints.connections.fail(drain_over("gateway"))
            await self._http.stop()
            await self._endpoints.connections.close()
        if self._access_log is not None:
            self._access_log.close()

    def _look(self) -> None:
        if self._endpoints is not None:
            self._endpoints.health.check(self._mailbox.peers)


def build(settings: Settings) -> GatewayActor:
    """The gateway for the configuration. Raises SetupError."""
    address = settings.http_address
    if address is None:
        raise SetupError("the setting `http` is off: give the gateway a host:port or unix:/path")
    user = access.parse(settings.nats_url).user
    if user.startswith(access.SERVICE_PREFIX) and not settings.http_keys:
        raise SetupError(
            f"as {user} the gateway may act for every tenant, and `http_keys` is empty: set it to the file "
            "of keys, DIR/gateway/keys of `headrace auth DIR`"
        )
    allow_files()
    cert, access_log = settings.http_tls_cert, settings.access_log
    return GatewayActor(
        address,
        Keys(settings.http_keys),
        settings.request_timeout_s,
        shared=settings.gateways > 1,
        tls=read_certificate(cert, settings.http_tls_key) if cert else None,
        access_log=AccessLog(access_log, prompts=settings.access_log_prompts) if access_log else None,
        origins=[origin.strip() for origin in settings.http_cors.split(",") if origin.strip()],
        awaited=settings.fleet_models,
        ping_s=settings.http_ping_s,
    )


def read_certificate(cert: str, key: str) -> Tls:
    """A context with the certificate in file `cert`. When that file changes, later connections get the new
    one. Raises SetupError."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)

    def load(_: str) -> ssl.SSLContext:
        context.load_cert_chain(cert, key)
        return context

    return WatchedFile("http_tls_cert", cert, load, log)


def allow_files() -> None:
    """Raise the limit of open files, up to MAX_FILES: the default of 1,024 is too low for connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < FEW_FILES:
        log.warning(
            "only %d files may be open (ulimit -n): further connections are closed without an answer", most
        )


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A listening TCP socket; port 0 is any free one. Raises SetupError."""
    bound = bind(host, port, shared=shared)
    # Accepted connections inherit these options.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for value, name in ((STALL_MS, "TCP_USER_TIMEOUT"), *_PROBES):
        if hasattr(socket, name):  # Linux
            bound.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return bound


class _Uvicorn(uvicorn.Server):
    """A uvicorn server with an event for its start, and without signal handlers."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves an application on a socket until it is drained."""

    def __init__(
        self, app: ASGIApp, bound: socket.socket, tls: Tls | None = None, unix: UnixListener | None = None
    ) -> None:
        """`unix`: the listener that `bound` belongs to."""
        # Below ERROR every malformed request of any client would write a log line.
        logging.getLogger("uvicorn").setLevel(logging.ERROR)
        bound.listen(BACKLOG)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNSENT_BYTES)  # accepted connections inherit it
        bound.setblocking(False)
        self._bound, self._unix = bound, unix
        secure = tls is not None
        if unix is None:
            self.address: tuple[str, int] = bound.getsockname()[:2]
            self.url = http_url(*self.address, tls=secure)
        else:
            self.address, self.url = ("", 0), unix_url(unix.path, tls=secure)
        config = uvicorn.Config(
            app,
            http=Connection,
            loop="none",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=int(KEEP_ALIVE_S),
        )
        config.load()
        config.ssl = None if tls is None else tls.value
        self._server = _Uvicorn(config)
        self._task: asyncio.Task[None] | None = None
        self._sweeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return when the server accepts connections."""
        self._task = asyncio.create_task(self._server.serve([self._bound]))
        self._sweeping = asyncio.create_task(self._sweep())
        up = asyncio.create_task(self._server.up.wait())
        await asyncio.wait({self._task, up}, return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        self.check()

    def check(self) -> None:
        """Raise the error of the server if it has ended."""
        if self._task is not None and self._task.done() and not self._server.should_exit:
            self._task.result()
            raise SetupError("the HTTP server ended by itself")
        if self._unix is not None and not self._server.should_exit:
            self._unix.check()
        if self._sweeping is not None and self._sweeping.done():
            self._sweeping.result()

    async def drain(self) -> None:
        """Accept nothing new; return when all running requests are answered."""
        self._leave()
        if self._task is not None:
            await asyncio.shield(self._task)

    async def stop(self) -> None:
        """Accept nothing new; cancel the requests that still run after LEAVE_S."""
        self._leave()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=LEAVE_S)
            self._server.force_exit = True
            for task in list(self._server.server_state.tasks):
                task.cancel()
            await self._task
        if self._sweeping is not None:
            self._sweeping.cancel()

    def _leave(self) -> None:
        self._server.should_exit = True
        if self._unix is not None:
            self._unix.remove()

    async def _sweep(self) -> None:
        loop, connections = asyncio.get_running_loop(), self._server.server_state.connections
        while True:
            await asyncio.sleep(SWEEP_S)
            sweep([*connections], loop.time())
