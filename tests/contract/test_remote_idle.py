"""Connections to Redis that a server or a balancer ends while they are idle: they cost no hit."""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from redis import Redis
from support.redis_process import RedisProcess

from services.kv_offload.backends import lmcache
from services.kv_offload.backends.interface import Remote, open_remote

SIZE = 300_000
DATA = bytes(i % 251 for i in range(SIZE))
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: a close sends RST
DEADLINE_S = 2.0


class Balancer:
    """Forwards connections to a server, and ends those that are open as the test wants: `fin`, `rst`, or
    `silent`, which drops every byte from then on and sends nothing."""

    def __init__(self, server_port: int, host: str = "127.0.0.1") -> None:
        self._host, self._server_port = host, server_port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.port = self._listener.getsockname()[1]
        self._open: list[tuple[socket.socket, socket.socket]] = []
        self._silent: set[socket.socket] = set()
        self._wake, self._waker = socket.socketpair()
        self._ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self, how: str) -> int:
        """End all open connections; returns their number."""
        pairs, self._open = self._open, []
        for client, server in pairs:
            if how == "silent":
                self._silent |= {client, server}
                continue
            if how == "rst":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            client.close()
            server.close()
        self._waker.send(b"x")
        return len(pairs)

    def close(self) -> None:
        self._ended = True
        self._waker.send(b"x")
        self._thread.join()
        for each in (*[s for pair in self._open for s in pair], *self._silent, self._listener):
            each.close()
        self._wake.close()
        self._waker.close()

    def _run(self) -> None:
        while not self._ended:
            to = {a: b for pair in self._open for a, b in (pair, pair[::-1])}
            with suppress(OSError, ValueError):
                for ready in select.select([self._listener, self._wake, *to], [], [], 10)[0]:
                    if ready is self._listener:
                        client = self._listener.accept()[0]
                        self._open.append((client, socket.create_connection((self._host, self._server_port))))
                    elif ready is self._wake:
                        self._wake.recv(100)
                    elif data := ready.recv(1 << 16):
                        to[ready].sendall(data)
                    else:
                        self._open = [pair for pair in self._open if ready not in pair]
                        ready.close()
                        to[ready].close()


def calls(remote: Remote) -> dict[str, tuple[Callable[[], object], object]]:
    """Each call, and its answer where `aa` is stored."""
    return {
        "has": (lambda: remote.has(["aa", "zz"]), [True, False]),
        "get": (lambda: remote.get("aa", memoryview(bytearray(SIZE))), SIZE),
        "absent": (lambda: remote.get("zz", memoryview(bytearray(SIZE))), 0),
        "put": (lambda: remote.put("bb", memoryview(DATA)), None),
        "delete": (lambda: remote.delete("aa"), None),
    }


def warm(remote: Remote) -> None:
    """All connections stand, and `aa` is stored."""
    remote.put("aa", memoryview(DATA))
    assert remote.get("aa", memoryview(bytearray(SIZE))) == SIZE
    assert remote.has(["aa"]) == [True]


@pytest.fixture(params=["127.0.0.1", "::1"])
def redis(request: pytest.FixtureRequest) -> Iterator[RedisProcess]:
    with RedisProcess(bind=request.param) as server:
        yield server


@pytest.mark.parametrize("name", ["has", "get", "absent", "put", "delete"])
@pytest.mark.parametrize("how", ["fin", "rst", "silent"])
def test_a_connection_that_a_balancer_ended_is_replaced_within_the_call(
    redis: RedisProcess, monkeypatch: pytest.MonkeyPatch, how: str, name: str
) -> None:
    host = "::1" if "[" in redis.url else "127.0.0.1"
    balancer = Balancer(redis.port, host)
    remote = open_remote(redis.url.replace(str(redis.port), str(balancer.port)), DEADLINE_S)
    warm(remote)
    assert balancer.end(how) >= 1
    if how == "silent":  # nothing shows it but the time
        monkeypatch.setattr(lmcache, "IDLE_S", 0.0)
    call, answer = calls(remote)[name]
    assert call() == answer
    with Redis(host=host, port=redis.port) as other:
        stored = {key.decode().rpartition("@")[2] for key in other.scan_iter()}
    assert stored == {"put": {"aa", "bb"}, "delete": set[str]()}.get(name, {"aa"})
    remote.close()
    balancer.close()


@pytest.mark.parametrize("victim", ["strlen", "get", "set", "exists"])
def test_a_server_that_ends_one_connection_of_two_loses_no_value(redis: RedisProcess, victim: str) -> None:
    """An answer that did not come is no damaged value, which would be deleted."""
    host = "::1" if "[" in redis.url else "127.0.0.1"
    remote = open_remote(redis.url, DEADLINE_S)
    with Redis(host=host, port=redis.port) as admin:
        own = admin.client_id()
        for name in calls(remote):
            warm(remote)
            if victim == "set":
                remote.put("cc", memoryview(DATA))
            elif victim != "exists":
                remote.get("aa", memoryview(bytearray(SIZE)))
            for each in admin.client_list():
                if each["cmd"] == victim and each["id"] != str(own):
                    admin.client_kill_filter(_id=each["id"])
            call, answer = calls(remote)[name]
            assert (name, call()) == (name, answer)
            remote.delete("cc")
    remote.close()


def test_a_server_with_an_idle_limit_costs_no_call() -> None:
    """`timeout 1` of redis-server: it ends connections between its ticks."""
    with RedisProcess(timeout="1") as server, Redis(port=server.port) as admin:
        remote = open_remote(server.url, DEADLINE_S)
        warm(remote)
        own = admin.client_id()
        while [each for each in admin.client_list() if each["id"] != str(own)]:
            pass
        assert remote.has(["aa"]) == [True]
        assert remote.get("aa", memoryview(bytearray(SIZE))) == SIZE
        remote.close()
