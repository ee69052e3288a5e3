"""A nats-server with TLS alone, and a certificate that the system does not trust."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.self_signed import self_signed

from services.launcher import credentials
from services.launcher import nats_server as servers
from services.launcher.commands import auth
from services.launcher.commands.auth import Plan
from shared.errors import SetupError
from shared.nats.bus import NatsBus


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """(folder of `headrace auth` with ca.pem and key.pem, address of the server)."""
    folder = tmp_path_factory.mktemp("tls")
    self_signed(folder / "ca.pem", folder / "key.pem")
    tls = auth.tls_of(str(folder / "ca.pem"), str(folder / "key.pem"))
    auth.generate(folder, Plan("tls://nats:4222", "default", tls=tls), print)
    conf = (folder / "nats" / "nats.conf").read_text()
    (block,) = [line for line in conf.splitlines() if line.startswith("tls ")]
    server = servers.start(extra=credentials.authorization(folder, "default") + block + "\n")
    yield folder, server.url.replace("nats://", "tls://")
    server.stop()


async def test_message_passes_over_tls(secure: tuple[Path, str]) -> None:
    folder, address = secure
    url = credentials.url_of(folder, "public", address) + f"?ca={folder / 'ca.pem'}"
    bus = await asyncio.wait_for(NatsBus.connect(url), 10)
    got: asyncio.Queue[bytes] = asyncio.Queue()
    await bus.subscribe("_INBOX.public.x", lambda delivery: got.put_nowait(delivery.data))
    await bus.flush()
    other = await NatsBus.connect(
        credentials.url_of(folder, "detokenizer", address) + f"?ca={folder / 'ca.pem'}"
    )
    other.publish("_INBOX.public.x", b"hello")
    assert await asyncio.wait_for(got.get(), 10) == b"hello"
    await other.drain()
    await bus.drain()


async def test_server_with_an_untrusted_certificate_is_an_error_at_once(secure: tuple[Path, str]) -> None:
    folder, address = secure
    with pytest.raises(SetupError, match="CERTIFICATE_VERIFY_FAILED"):
        await asyncio.wait_for(NatsBus.connect(credentials.url_of(folder, "public", address)), 10)


async def test_no_password_goes_to_a_server_without_tls_when_the_url_is_tls() -> None:
    got: asyncio.Queue[bytes] = asyncio.Queue()

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"S","version":"2.11.0","max_payload":1048576,"headers":true}\r\n')
        got.put_nowait(await reader.read(4096))
        writer.close()

    async with await asyncio.start_server(pretend, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(SetupError, match="asks for no TLS"):
            await NatsBus.connect(f"tls://public:secret@127.0.0.1:{port}", timeout_s=5)
        assert await asyncio.wait_for(got.get(), 5) == b""
