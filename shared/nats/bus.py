"""NatsBus is the Bus over a nats-server, through nats-py. `_Client` replaces how that reads and writes.

    publish() ──▶ nats-py's buffer ──after this turn of the event loop──▶ socket, if it has room; else
              ──▶ outbox ──writer task──▶ nats-py's buffer ──flusher──▶ socket

The outbox makes `publish` synchronous and keeps the order of the calls, requests included. While the
server is away messages wait there, bounded by OUTBOX_LIMIT_BYTES, and leave after the reconnect.

    socket ──▶ nats-py's parser ──▶ handler, called at once

A handler is a plain function and runs inside the reader: no queue and no task per subscription. While it is
busy nothing is read, and messages wait in the socket and in the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
import sys
from collections import deque
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from urllib.parse import urlparse

from shared.clock import end_task
from shared.errors import SetupError, Unavailable
from shared.nats import access, interface
from shared.nats.subjects import PUBLIC


@contextlib.contextmanager
def _without(package: str) -> Iterator[None]:
    """Let optional imports of `package` fail."""
    before = sys.modules.get(package)
    sys.modules[package] = None  # type: ignore[assignment]  # Python's mark of a module that is absent
    try:
        yield
    finally:
        sys.modules.pop(package)
        if before is not None:
            sys.modules[package] = before


with _without("aiohttp"):  # only for WebSockets, see _open: the import takes 0.15 s of a core in each service
    from nats import errors as nats_errors
    from nats.aio import transport
    from nats.aio.client import Client as NatsClient
    from nats.aio.client import Srv
    from nats.aio.subscription import Subscription as NatsSubscription
    from nats.protocol.command import hpub_cmd, pub_cmd

RECONNECT_WAIT_S = 0.05  # back 10 ms after the server is; the library's 2 s would be a visible hole
PING_INTERVAL_S = 20
TURN_MESSAGES = (
    64  # that a connection handles before other tasks have their turn: some 3 ms of a gateway's frames
)
_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")  # of a header; nats-py changes or refuses others
_VALUE = re.compile(r"([!-~]([ -~]*[!-~])?)?")
WRITE_AHEAD_BYTES = 64 * 1024  # that may wait for a socket before nats-py waits for it
OUTBOX_LIMIT_BYTES = 64 * 1024 * 1024  # what a server that is away may cost in memory
FLUSH_TIMEOUT_S = 10
CLOSE_TIMEOUT_S = 1.0
CANCEL_AGAIN_S = 0.05

_VIOLATION = "authorization violation"
_TOO_LARGE = "maximum payload violation"
_DENIED = "permissions violation"
_DENIED_READING = "permissions violation for subscription"
_CUTS = (OSError, nats_errors.UnexpectedEOF, nats_errors.StaleConnectionError)
_CLOSED_AT_ONCE = (ConnectionResetError, BrokenPipeError, nats_errors.UnexpectedEOF)
_PERHAPS_FULL = "the server closes each connection at once: perhaps its account has as many as it may"


class _Client(NatsClient):
    """nats-py with a `flush` that is a barrier. Its own is none: its PING overtakes messages that still wait
    for the flusher task. The first round trip lets that task write, so the second PING follows them.
    Draining a subscription relies on this, too: messages that arrive before its UNSUB were lost otherwise.

    Its own reader puts each message into the queue of a subscription, and a task takes it from there: this
    one calls the handler. Its own parses all that one read of the socket brought, 256 kB with uvloop, before
    another task runs: this one stops after `turn_messages`.

    Its own adds each address that a cluster advertises without a login, keeps those that are gone, and takes
    a configured address for a new one. Here they have the login, and leave with the server."""

    turn = 0  # messages since other tasks ran
    turn_messages = TURN_MESSAGES
    write_due = False  # in the next turn

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        """Its own reads the limit of messages at a connect alone, and a reload may change it; it learns the
        addresses of a cluster without a login; it sends the password without TLS, also to a `tls://` URL, if
        the server does not require TLS."""
        server = self._current_server
        if server is not None and server.uri.scheme == "tls" and not info.get("tls_required"):
            raise NoTls("it asks for no TLS, and the URL is tls://: give it a certificate, or write nats://")
        self._max_payload = int(info.get("max_payload", self._max_payload))
        await super()._process_info({**info, "connect_urls": None}, initial_connection)
        if info.get("connect_urls"):
            self._learn(info["connect_urls"], tls=bool(info.get("tls_required")))

    def _learn(self, advertised: list[str], *, tls: bool) -> None:
        """Have the configured addresses and those that the cluster advertises now in the pool."""
        current = self._current_server
        assert current is not None, "the addresses come from a server"
        given, _, _ = current.uri.netloc.rpartition("@")
        login = f"{given}@" if given else ""
        urls = [urlparse(current.uri._replace(netloc=f"{login}{each}").geturl()) for each in advertised]
        alive = {(url.hostname, url.port) for url in urls}
        pool = self._server_pool
        pool[:] = [
            each
            for each in pool
            if not each.discovered or each is current or (each.uri.hostname, each.uri.port) in alive
        ]
        known = {(each.uri.hostname, each.uri.port) for each in pool}
        for url in urls:
            if (url.hostname, url.port) not in known:
                name = (
                    current.tls_name or current.uri.hostname
                    if tls and self._host_is_ip(url.hostname)
                    else None
                )
                pool.append(Srv(url, discovered=True, tls_name=name))

    @property
    def is_at_discovered(self) -> bool:
        """True if the last address that was tried is one that a server has advertised."""
        return self._current_server is not None and bool(self._current_server.discovered)

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        subscription = self._subs.get(sid)
        if subscription is None:
            return  # it has ended
        found = await self._process_headers(headers) if headers else None
        deliver: Any = subscription._cb
        try:
            await deliver(
                interface.Delivery(subject.decode(), data, reply.decode(), found or interface.NO_HEADERS)
            )
        except Exception as error:  # noqa: BLE001 - the reader outlives any error of a handler
            await self._error_cb(error)
        self.turn += 1
        if self.turn >= self.turn_messages:
            self.turn = 0
            await asyncio.sleep(0)

    def enqueue(self, message: _Outgoing) -> bool:
        """Append a message to nats-py's buffer, which is written after this turn of the event loop. False if
        that is for `publish`: its subject or a header is bad, or the socket is full or no TCP socket.

        nats-py's `publish` runs in a task and wakes another one, which costs two more turns of the event loop
        for each message. Without them a scheduler that takes a whole core handles 1.17 times the tokens."""
        writer = getattr(self._transport, "_io_writer", None)
        names = [message.subject, message.reply] if message.reply else [message.subject]
        if writer is None or not self.is_connected or " ".join(names).split() != names:
            return False
        head = _head(message.headers) if message.headers else b""
        if head is None:
            return False
        if writer.transport.get_write_buffer_size() > WRITE_AHEAD_BYTES:
            return False
        if head:
            command = hpub_cmd(message.subject, message.reply, head, message.data)
        else:
            command = pub_cmd(message.subject, message.reply, message.data)
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += len(message.data)
        self._pending.append(command)
        self._pending_data_size += len(command)
        if not self.write_due:
            self.write_due = True
            asyncio.get_running_loop().call_soon(self._write_pending)
        return True

    def _write_pending(self) -> None:
        self.write_due = False
        if self._pending and self.is_connected and self._transport is not None:  # else after the reconnect
            self._transport.writelines(self._pending)
            self._pending, self._pending_data_size = [], 0

    async def _process_pong(self) -> None:
        """A PONG to a `flush` that was cancelled. Its own would end the reader and so the connection."""
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    async def _process_err(self, err_msg: str) -> None:
        """Its own closes the connection for good. The server has ended it for a message that was on its way
        while a reload lowered the limit: the next connection has the new one."""
        if _TOO_LARGE in err_msg.lower():
            await self._process_op_err(nats_errors.MaxPayloadError())
        else:
            await super()._process_err(err_msg)

    async def flush(self, timeout: int = FLUSH_TIMEOUT_S) -> None:  # noqa: ASYNC109 - the name of nats-py
        """Return when the server has handled all that was sent before."""
        await super().flush(timeout)
        await super().flush(timeout)


@dataclass(frozen=True, slots=True)
class _Outgoing:
    subject: str
    data: bytes
    reply: str
    headers: dict[str, str] | None


@dataclass(slots=True)
class _Subscribed:
    """A live subscription. See shared.nats.interface.Subscription."""

    bus: NatsBus
    inner: NatsSubscription

    async def cancel(self) -> None:
        await self.bus.unsubscribe(self)

    async def drain(self) -> None:
        await self.bus.unsubscribe(self, drain=True)


class NatsBus:
    """One connection to a nats-server. See shared.nats.interface.Bus."""

    def __init__(self, turn_messages: int = TURN_MESSAGES) -> None:
        self._nc = _Client()
        self._nc.turn_messages = turn_messages
        self.user = ""
        self._url = self._name = ""
        self._accounts = False
        self._online = asyncio.Event()
        self._subscriptions: list[_Subscribed] = []
        self._faults = Faults()
        self._outbox = _Outbox(self._nc, self._online, self._faults)
        self._replies: dict[str, asyncio.Future[interface.Delivery]] = {}
        self._reply_prefix = ""
        self._writer: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        name: str = "headrace",
        timeout_s: float | None = None,
        on_fault: interface.FaultHandler | None = None,
        turn_messages: int = TURN_MESSAGES,
    ) -> NatsBus:
        """Connect to `url` (several joined by commas) and stay connected: a lost connection is opened again.

        Waits for the server for as long as it takes, or `timeout_s`; then raises SetupError.
        Other tasks run after each `turn_messages`.
        """
        bus = cls(turn_messages)
        if on_fault is not None:
            bus.on_fault(on_fault)
        try:
            bus._faults.cause = "no answer"
            await _within(bus._open(url, name), timeout_s)
        except (TimeoutError, OSError, nats_errors.Error) as error:
            # nats-py asserts that `connect` has begun; after a failed TLS handshake `close` never returns
            with contextlib.suppress(TimeoutError, OSError, nats_errors.Error, AssertionError):
                await _within(bus._nc.close(), CLOSE_TIMEOUT_S)
            raise SetupError(_why_not(url, error, bus._faults.cause)) from error
        return bus

    async def _open(self, url: str, name: str) -> None:
        named = access.parse(url)
        self.user, self._accounts, self._url, self._name = named.user, named.accounts, url, name
        self._faults.addresses = len(named.servers)
        if named.servers[0].startswith("ws"):
            vars(transport).update({name: import_module(name) for name in ("aiohttp", "multidict")})
        options: dict[str, Any] = {
            "servers": list(named.servers),
            "tls": named.tls(),
            "inbox_prefix": named.inbox_prefix,
            "name": name,
            "max_reconnect_attempts": -1,
            "reconnect_time_wait": RECONNECT_WAIT_S,
            "ping_interval": PING_INTERVAL_S,
            "error_cb": self._on_error,
            "disconnected_cb": self._on_disconnected,
            "reconnected_cb": self._on_reconnected,
            "closed_cb": self._faults.on_closed,
        }
        await self._nc.connect(**options)
        self._faults.opened = self._faults.online = True
        self._online.set()
        self._reply_prefix = self._nc.new_inbox()
        self._writer = asyncio.get_running_loop().create_task(self._outbox.write())
        await self.subscribe(f"{self._reply_prefix}.*", self._on_reply)

    # ---- the Bus --------------------------------------------------------------------------------

    @property
    def max_payload(self) -> int:
        return int(self._nc.max_payload)

    @property
    def backlog_bytes(self) -> int:
        return self._outbox.bytes + int(self._nc.pending_data_size)

    def publish(
        self, subject: str, data: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        interface.check_payload(subject, data, headers, self.max_payload)
        self._outbox.put(_Outgoing(subject, data, reply, dict(headers) if headers else None))

    async def subscribe(self, pattern: str, handler: interface.Handler, *, queue: str = "") -> _Subscribed:
        mapped = self._accounts and pattern.startswith(f"{PUBLIC}.")

        async def deliver(delivery: Any) -> None:  # nats-py wants a coroutine
            handler(access.mapped(delivery) if mapped else delivery)

        inner = await self._nc.subscribe(pattern, queue=queue, cb=deliver)
        subscription = _Subscribed(self, inner)
        self._subscriptions.append(subscription)
        return subscription

    async def unsubscribe(self, subscription: _Subscribed, *, drain: bool = False) -> None:
        """End a subscription of this connection. A second call does nothing."""
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
            # the connection is closing, and with it this; or the server has stopped answering
            with contextlib.suppress(nats_errors.Error):
                if drain and self._nc.is_connected:
                    await _drain(subscription.inner)
                else:
                    await subscription.inner.unsubscribe()

    async def request(
        self, subject: str, data: bytes, *, timeout_us: int, headers: Mapping[str, str] | None = None
    ) -> interface.Delivery:
        token = self._nc.new_inbox().rpartition(".")[2]
        answer: asyncio.Future[interface.Delivery] = asyncio.get_running_loop().create_future()
        self._replies[token] = answer
        try:
            self.publish(subject, data, reply=f"{self._reply_prefix}.{token}", headers=headers)
            async with asyncio.timeout(timeout_us / 1e6):
                delivery = await answer
        except TimeoutError:
            raise interface.RequestTimeout(f"no answer on {subject} within {timeout_us / 1e6:g} s") from None
        finally:
            del self._replies[token]
        if delivery.has_no_responders:
            raise interface.NoResponders(f"nothing listens to {subject}")
        return delivery

    async def another(self, suffix: str, timeout_s: float, turn_messages: int = TURN_MESSAGES) -> NatsBus:
        name = f"{self._name}-{suffix}"
        return await NatsBus.connect(self._url, name=name, timeout_s=timeout_s, turn_messages=turn_messages)

    def new_inbox(self) -> str:
        return str(self._nc.new_inbox())

    def on_fault(self, handler: interface.FaultHandler) -> None:
        self._faults.handlers.append(handler)

    async def flush(self) -> None:
        try:
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await self._outbox.empty.wait()
                await self._online.wait()
                await self._nc.flush(FLUSH_TIMEOUT_S)
        except TimeoutError:
            raise Unavailable(f"the nats-server did not answer within {FLUSH_TIMEOUT_S} s") from None

    async def drain(self) -> None:
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        await asyncio.shield(self._draining)

    async def _drain(self) -> None:
        if self._nc.is_connected:
            # cut off half-way, or the server has stopped answering: nothing is left to deliver
            with contextlib.suppress(nats_errors.Error, OSError, Unavailable):
                await asyncio.gather(*(_drain(s.inner) for s in self._subscriptions))
                await self.flush()
        self._subscriptions.clear()
        self._faults.silent = True
        if self._writer is not None:
            self._writer.cancel()
        with contextlib.suppress(OSError):  # it was cut, and nats-py writes what is left all the same
            await self._nc.close()

    # ---- reports of nats-py ---------------------------------------------------------------------

    def _on_reply(self, delivery: interface.Delivery) -> None:
        answer = self._replies.get(delivery.subject.rpartition(".")[2])
        if answer is not None and not answer.done():
            answer.set_result(delivery)

    async def _on_error(self, error: Any) -> None:
        await self._faults.on_error(error, configured=not self._nc.is_at_discovered)

    async def _on_disconnected(self) -> None:
        self._online.clear()
        self._faults.online = False
        self._faults.report("disconnected", f"the nats-server is away ({self._faults.cause}); reconnecting")

    async def _on_reconnected(self) -> None:
        self._faults.online, self._faults.refusals = True, 0
        server = self._nc.connected_url
        self._faults.report("reconnected", f"back on {server.hostname}:{server.port}" if server else "back")
        self._online.set()


class _Outbox:
    """Messages on their way to nats-py, in order."""

    def __init__(self, nc: _Client, online: asyncio.Event, faults: Faults) -> None:
        self.bytes = 0
        self.empty = asyncio.Event()
        self.empty.set()
        self._nc = nc
        self._online = online
        self._faults = faults
        self._messages: deque[_Outgoing] = deque()
        self._work = asyncio.Event()

    def put(self, message: _Outgoing) -> None:
        """Write a message, or queue it; one too many is dropped and reported."""
        if not self._messages and self._online.is_set() and self._nc.enqueue(message):
            return
        if self.bytes + len(message.data) > OUTBOX_LIMIT_BYTES:
            waiting = f"{OUTBOX_LIMIT_BYTES} bytes wait for the server"
            self._faults.report("overflow", f"{waiting}: dropped {message.subject}")
            return
        self._messages.append(message)
        self.bytes += len(message.data)
        self._work.set()
        self.empty.clear()

    async def write(self) -> None:
        """Hand messages to nats-py for ever, while it is connected."""
        while True:
            await self._work.wait()
            await self._online.wait()
            message = self._messages[0]
            try:
                await self._nc.publish(message.subject, message.data, message.reply, message.headers)
            except nats_errors.OutboundBufferLimitError:
                self._online.clear()  # cut off under our hands; the reconnect callback sets it again
                continue
            except (nats_errors.Error, ValueError) as error:
                self._faults.report("error", f"not sent to {message.subject}: {text(error)}")
            self._messages.popleft()
            self.bytes -= len(message.data)
            if not self._messages:
                self._work.clear()
                self.empty.set()


def _head(headers: Mapping[str, str]) -> bytes | None:
    """The headers as nats-py writes them; None if it would change or refuse one."""
    if not all(_NAME.fullmatch(name) and _VALUE.fullmatch(value) for name, value in headers.items()):
        return None
    lines = (f"{name}: {value}" for name, value in headers.items())
    return "\r\n".join(["NATS/1.0", *lines, "", ""]).encode()


async def _within(work: Coroutine[Any, Any, None], timeout_s: float | None) -> None:
    """Await `work`; raises TimeoutError."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        if task.done():
            task.result()
        else:
            raise TimeoutError
    finally:
        await end_task(task, CANCEL_AGAIN_S)


def _why_not(url: str, error: BaseException, cause: str) -> str:
    """Why there is no connection, and what to do. `cause` is the last problem before a time limit."""
    where, user = access.shown(url), access.parse(url).user
    if isinstance(error, Refused):
        named = f"user {user!r}" if user else "a connection without user and password"
        return (
            f"the nats-server at {where} refuses {named} ({error}): put the URL that `headrace auth` made "
            "for this service or tenant into nats_url, for example in --config FILE"
        )
    why = cause if isinstance(error, TimeoutError) else text(error)
    return (
        f"no connection to the nats-server at {where} ({why}): start one with `headrace up`, "
        "or name another with --nats-url"
    )


async def _drain(subscription: Any) -> None:  # nats-py leaves its drain without a return type
    await subscription.drain()


class NoTls(nats_errors.Error):
    """A server does not ask for the TLS that its URL promises."""


class Refused(nats_errors.Error):
    """Bad credentials or an untrusted certificate. Not retryable."""


class Faults:
    """Turns what nats-py reports into BusFaults: one for each burst, and none for a repetition."""

    def __init__(self) -> None:
        self.handlers: list[interface.FaultHandler] = []
        self.cause = "end of connection"  # of the next "disconnected"
        self.by_server = False  # why there is no first connection, by the server itself
        self.opened = False  # since the first connection
        self.online = False
        self.silent = False
        self.refusals = 0  # by configured addresses, since the last connection
        self.addresses = 1  # configured ones

    def report(self, kind: str, detail: str) -> None:
        """Tell every handler."""
        if not self.silent:
            for handler in self.handlers:
                handler(interface.BusFault(kind, detail))

    async def on_error(self, error: Any, *, configured: bool = True) -> None:
        """What `error_cb` of nats-py gets: permissions, failed attempts to connect, a handler's error. Raises
        Refused or NoTls out of the first `connect`, which would try for ever. `configured`: the address is
        none that a cluster has advertised."""
        words = str(error).lower()
        if isinstance(error, NoTls) and not self.opened:
            raise error
        if isinstance(error, ssl.SSLCertVerificationError) and not self.opened:
            raise Refused(text(error))  # nats-py does not try again: it waits for the end of the handshake
        if _VIOLATION in words or isinstance(error, (ssl.SSLCertVerificationError, NoTls)):
            self._on_refused(text(error), configured=configured)
        elif _DENIED in words:
            self.report("refused" if _DENIED_READING in words else "permission", str(error))
        elif not self.opened and isinstance(error, _CLOSED_AT_ONCE):
            if not self.by_server:  # its reset may overtake its words, or follow them in the next attempt
                self.cause = f"{text(error)}; {_PERHAPS_FULL}"
        elif not self.opened or isinstance(error, _CUTS):
            self.cause, self.by_server = text(error), not isinstance(error, _CUTS)
        elif self.online:  # a failed attempt to reconnect follows "disconnected" anyway
            self.report("error", text(error))

    def _on_refused(self, why: str, *, configured: bool) -> None:
        """The login or the certificate is wrong if the configured addresses refuse it, one of them twice.
        What a cluster advertises may be out of date, or another server's by now."""
        self.cause = why
        self.refusals += configured
        if self.refusals <= self.addresses:
            return
        if not self.opened:
            raise Refused(why)
        self.report("refused", why)  # other credentials since

    async def on_closed(self) -> None:
        """The server ended the connection, and nats-py does not try again."""
        self.report("closed", "the nats-server ended the connection for good")


def text(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
