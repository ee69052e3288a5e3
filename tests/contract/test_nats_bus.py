"""What only a real network does to a NatsBus: reconnects, slow handlers, refusals."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlparse

import pytest
from nats import errors as nats_errors

from services.launcher import nats_server as servers
from services.launcher.nats_server import NatsServer
from shared.client.client import Client
from shared.errors import PayloadTooLarge, SetupError, Unavailable, error_body
from shared.nats import bus as nats_bus
from shared.nats import subjects
from shared.nats.bus import OUTBOX_LIMIT_BYTES, NatsBus
from shared.nats.interface import BusFault, Delivery
from shared.replies import to_json


class Faults:
    """Collects faults and wakes the waiter for a kind."""

    def __init__(self) -> None:
        self.got: list[BusFault] = []
        self._changed = asyncio.Event()

    def __call__(self, fault: BusFault) -> None:
        self.got.append(fault)
        self._changed.set()

    async def wait_for(self, kind: str) -> BusFault:
        async with asyncio.timeout(60):
            while not (found := [f for f in self.got if f.kind == kind]):
                self._changed.clear()
                await self._changed.wait()
        return found[0]


@pytest.fixture
def own_server() -> Iterator[list[NatsServer]]:
    """A server of the test's own in a list, so that the test may replace it."""
    running = [servers.start()]
    yield running
    for server in running:
        server.stop()


@pytest.mark.parametrize("ahead", [-1, 0, nats_bus.WRITE_AHEAD_BYTES])
async def test_all_ways_to_the_socket_keep_the_order(
    own_server: list[NatsServer], monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    """Written at once, or by nats-py: a header needs its care, or the socket is full (`ahead` -1: always)."""
    monkeypatch.setattr(nats_bus, "WRITE_AHEAD_BYTES", ahead)
    faults, got, everything = Faults(), [], asyncio.Event()
    bus = await NatsBus.connect(own_server[0].url, on_fault=faults, timeout_s=30)

    def collect(delivery: Delivery) -> None:
        number, _, rest = delivery.data.partition(b" ")
        got.append((int(number), delivery.reply, dict(delivery.headers), len(rest)))
        if number == b"399":
            everything.set()

    await bus.subscribe("a.*", collect)
    await bus.flush()
    wanted = []
    for i in range(400):
        headers, reply, size = (
            {"n": str(i), "Empty": "", "k": " ä\nb"[: i % 5]} if i % 7 == 3 else {},
            "b.c" if i % 5 == 1 else "",
            40_000 * (i % 3),
        )
        bus.publish("a.b", b"%d " % i + bytes(size), reply=reply, headers=headers)
        sent = {name: value.strip().replace("\n", " ") for name, value in headers.items()}
        wanted.append((i, reply, sent, size))
        if i % 50 == 49:
            await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await everything.wait()
    assert got == wanted
    bus.publish("a b", b"")
    bus.publish("a.b\r\nPUB a.b 1\r\nx", b"")
    bus.publish("a.b", b"", headers={"x\r\nPUB a.b 1": "y"})
    assert (await faults.wait_for("error")).detail.startswith("not sent to a b")
    await bus.flush()
    assert got == wanted
    assert [fault.kind for fault in faults.got] == ["error"] * 3
    await bus.drain()


async def test_comes_back_after_the_server_was_killed(own_server: list[NatsServer]) -> None:
    faults, got, everything = Faults(), [], asyncio.Event()
    server = own_server[0]
    bus = await NatsBus.connect(server.url, on_fault=faults, timeout_s=30)

    def collect(delivery: Delivery) -> None:
        got.append(int(delivery.data))
        if delivery.data == b"99":
            everything.set()

    await bus.subscribe("a.*", collect)
    await bus.flush()
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    await faults.wait_for("disconnected")
    for i in range(100):
        bus.publish("a.b", b"%d" % i)
    assert bus.backlog_bytes == sum(len(str(i)) for i in range(100))
    port = urlparse(server.url).port
    assert port is not None
    own_server.append(servers.start(port))
    await faults.wait_for("reconnected")
    await asyncio.wait_for(everything.wait(), 10)
    assert got == list(range(100))
    assert [f.kind for f in faults.got] == ["disconnected", "reconnected"]
    await bus.drain()


async def test_waits_at_the_start_for_a_server_that_comes_late() -> None:
    probe = servers.start()
    port = urlparse(probe.url).port
    assert port is not None
    probe.stop()
    connecting = asyncio.create_task(NatsBus.connect(f"nats://127.0.0.1:{port}"))
    await asyncio.sleep(0)
    late = servers.start(port)
    bus = await asyncio.wait_for(connecting, 60)
    await bus.flush()
    await bus.drain()
    late.stop()


async def test_a_server_that_is_not_there_is_a_setup_error() -> None:
    probe = servers.start()
    probe.stop()
    with pytest.raises(
        SetupError, match=r"no connection to the nats-server at nats://127\.0\.0\.1:.*headrace up"
    ):
        await NatsBus.connect(probe.url, timeout_s=0.2)


async def test_server_that_resets_each_connection_is_distinguished_from_an_absent_one() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"max_payload": 1048576}\r\n')
        await reader.readline()
        without_a_time_to_linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, without_a_time_to_linger
        )
        writer.transport.abort()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(SetupError, match="closes each connection at once: perhaps its account has as many"):
        await NatsBus.connect(f"nats://127.0.0.1:{port}", timeout_s=1)
    server.close()


async def test_the_words_of_the_server_outlive_its_resets() -> None:
    """Which of the two an attempt meets is chance."""
    faults = nats_bus.Faults()
    full = nats_errors.Error("nats: 'maximum account active connections exceeded'")
    for error in (ConnectionResetError(), full, ConnectionResetError(), nats_errors.UnexpectedEOF()):
        await faults.on_error(error)
    assert "maximum account active connections exceeded" in faults.cause
    await faults.on_error(ConnectionRefusedError())  # the server has ended
    assert faults.cause == "ConnectionRefusedError"


async def test_a_slow_handler_loses_nothing(nats_server: NatsServer, fleet: str) -> None:
    """What it has not read waits in the socket and in the server."""
    got: list[bytes] = []

    def slowly(delivery: Delivery) -> None:
        if len(got) % 100 == 0:
            time.sleep(0.01)
        got.append(delivery.data)

    reader = await NatsBus.connect(nats_server.url, timeout_s=30)
    sender = await NatsBus.connect(nats_server.url, timeout_s=30)
    await reader.subscribe(fleet, slowly)
    await reader.flush()
    sent = [b"%d" % i + bytes(500) for i in range(20_000)]
    for data in sent:
        sender.publish(fleet, data)
    await sender.drain()
    await reader.drain()
    assert got == sent


async def test_the_reader_outlives_an_error_of_a_handler(nats_server: NatsServer, fleet: str) -> None:
    faults, got = Faults(), []

    def fails_once(delivery: Delivery) -> None:
        got.append(delivery.data)
        if len(got) == 1:
            raise ValueError("not mine")

    bus = await NatsBus.connect(nats_server.url, on_fault=faults, timeout_s=30)
    await bus.subscribe(fleet, fails_once)
    bus.publish(fleet, b"1")
    bus.publish(fleet, b"2")
    fault = await faults.wait_for("error")
    assert fault.detail == "ValueError: not mine"
    await bus.drain()
    assert got == [b"1", b"2"]


async def test_the_reader_outlives_a_flush_that_was_cancelled(nats_server: NatsServer, fleet: str) -> None:
    bus = await NatsBus.connect(nats_server.url, timeout_s=30)
    came = asyncio.Event()
    await bus.subscribe(fleet, lambda delivery: came.set())
    for turns in range(8):  # for any of its waits
        flushing = asyncio.create_task(bus.flush())
        for _ in range(turns):
            await asyncio.sleep(0)
        flushing.cancel()
        await asyncio.gather(flushing, return_exceptions=True)
    bus.publish(fleet, b"")
    await asyncio.wait_for(came.wait(), 10)
    await bus.drain()


async def test_a_full_outbox_is_a_fault(own_server: list[NatsServer]) -> None:
    faults = Faults()
    bus = await NatsBus.connect(own_server[0].url, on_fault=faults, timeout_s=30)
    own_server[0].process.kill()
    await faults.wait_for("disconnected")
    piece = bytes(8 * 1024 * 1024)
    for _ in range(OUTBOX_LIMIT_BYTES // len(piece)):
        bus.publish("a", piece)
    assert len(faults.got) == 1
    bus.publish("a", b"x")
    assert faults.got[1:] == [
        BusFault("overflow", f"{OUTBOX_LIMIT_BYTES} bytes wait for the server: dropped a")
    ]
    assert bus.backlog_bytes == OUTBOX_LIMIT_BYTES
    await asyncio.wait_for(bus.drain(), 5)


async def test_a_connection_that_was_cut_with_something_to_send_is_drained(
    own_server: list[NatsServer],
) -> None:
    faults = Faults()
    bus = await NatsBus.connect(own_server[0].url, on_fault=faults, timeout_s=30)
    own_server[0].process.kill()
    await faults.wait_for("disconnected")
    await bus.subscribe("a", lambda _: None)
    await bus.drain()
    assert bus._nc.is_closed


async def test_a_refused_subject_is_a_fault(tmp_path: Path) -> None:
    server = servers.start(
        extra='authorization { users = [{user: u, password: p, permissions: {publish: "ok"}}] }'
    )
    faults = Faults()
    bus = await NatsBus.connect(server.url.replace("//", "//u:p@"), on_fault=faults, timeout_s=30)
    bus.publish("forbidden", b"")
    fault = await faults.wait_for("permission")
    assert "forbidden" in fault.detail
    await bus.drain()
    server.stop()


async def test_an_error_in_a_handler_is_a_fault(nats_server: NatsServer, fleet: str) -> None:
    faults = Faults()
    bus = await NatsBus.connect(nats_server.url, on_fault=faults, timeout_s=30)
    await bus.subscribe(fleet, lambda delivery: [][1])
    bus.publish(fleet, b"")
    assert await faults.wait_for("error") == BusFault("error", "IndexError: list index out of range")
    await bus.drain()


async def test_a_subject_that_cannot_be_sent_is_a_fault(nats_server: NatsServer, fleet: str) -> None:
    faults = Faults()
    bus = await NatsBus.connect(nats_server.url, on_fault=faults, timeout_s=30)
    bus.publish(f"{fleet} with spaces", b"")
    fault = await faults.wait_for("error")
    assert fault.detail.startswith(f"not sent to {fleet} with spaces")
    await bus.drain()


async def test_a_cancellation_that_gets_lost_does_not_hang_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """As inside nats-py on Python 3.11, when it meets a refused connection."""
    lost = []

    async def deaf(*_: object) -> None:
        while len(lost) < 2:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                lost.append(1)
        await asyncio.Event().wait()

    async def close(_: object) -> None:
        """Nothing was opened."""

    monkeypatch.setattr(NatsBus, "_open", deaf)
    monkeypatch.setattr("shared.nats.bus._Client.close", close)
    with pytest.raises(SetupError, match="no answer"):
        await NatsBus.connect("nats://127.0.0.1:1", timeout_s=0.01)
    assert len(lost) == 2


async def test_no_wait_for_a_server_that_stopped_answering_is_without_end(
    own_server: list[NatsServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.nats.bus.FLUSH_TIMEOUT_S", 0.2)
    bus = await NatsBus.connect(own_server[0].url, timeout_s=30)
    own_server[0].process.send_signal(signal.SIGSTOP)
    os.waitpid(own_server[0].process.pid, os.WUNTRACED)  # it may answer until it has stopped
    try:
        with pytest.raises(Unavailable, match=r"the nats-server did not answer within 0\.2 s"):
            await bus.flush()
    finally:
        own_server[0].process.send_signal(signal.SIGKILL)
    async with asyncio.timeout(60):
        with pytest.raises(Unavailable):
            await bus.flush()  # now it is away
        await bus.drain()


async def test_a_websocket_url_works_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = servers.start(extra=f"\nwebsocket {{ host: 127.0.0.1, port: {port}, no_tls: true }}\n")
    try:
        bus = await NatsBus.connect(f"ws://127.0.0.1:{port}", timeout_s=30)
        got = asyncio.Event()
        await bus.subscribe("a", lambda delivery: got.set())
        bus.publish("a", b"1")
        await asyncio.wait_for(got.wait(), 5)
        await bus.drain()
    finally:
        server.stop()


async def test_a_limit_of_messages_that_a_reload_lowers_refuses_the_request_and_ends_no_service(
    own_server: list[NatsServer],
) -> None:
    """The server announces no new limit, and cuts the connection of the next message above it."""
    (server,) = own_server
    faults = Faults()
    client = await Client.open(await NatsBus.connect(server.url, timeout_s=20, on_fault=faults))
    service = await NatsBus.connect(server.url, timeout_s=20, on_fault=faults)

    def on_request(asked: Delivery) -> None:
        size = 10 * len(asked.data)
        try:
            service.publish(asked.reply, b'{"text": "%s"}' % (b"x" * size))
        except PayloadTooLarge as error:
            service.publish(asked.reply, to_json(error_body(error)))

    await service.subscribe(subjects.generate_any_tenant("m"), on_request)
    await service.flush()
    config = Path(server.folder.name) / servers.CONFIG_NAME
    config.write_text(config.read_text().replace("max_payload: 8MB", "max_payload: 64KB"))
    server.process.send_signal(signal.SIGHUP)
    async with asyncio.timeout(20):
        while "Reloaded server configuration" not in server.log.read_text():
            await asyncio.sleep(0.01)
    with pytest.raises(PayloadTooLarge, match="over the server's limit of 65536"):
        await client.complete({"model": "m", "prompt": "x" * 100_000})
    assert client.bus.max_payload == 65_536
    late = asyncio.create_task(client.complete({"model": "m", "prompt": "x" * 10_000}))
    async with asyncio.timeout(20):
        while service.max_payload != 65_536:  # its answer cut its connection, too
            await asyncio.sleep(0.01)
    with pytest.raises(PayloadTooLarge, match="over the server's limit of 65536"):
        await client.complete({"model": "m", "prompt": "x" * 10_000})
    assert len((await client.complete({"model": "m", "prompt": "x" * 1_000}))["text"]) > 10_000
    assert {fault.kind for fault in faults.got} == {"disconnected", "reconnected"}
    late.cancel()
    await asyncio.gather(client.bus.drain(), service.drain())
