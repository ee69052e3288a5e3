"""The remote store's contract: that of the tests, LMCache's file-system client and a real redis-server."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.kv_offload.memory_remote import MemoryRemote
from support.redis_process import RedisProcess

from services.kv_offload.backends.interface import DamagedValue, Remote, RemoteError, open_remote
from shared.errors import SetupError

# A call that waits for an answer that never comes would run into this, and the test into its time limit.
DEADLINE_S = 60.0
GUARD = b"\xa5" * 64


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisProcess]:
    with RedisProcess() as server:
        yield server


@pytest.fixture(scope="module")
def redis6() -> Iterator[RedisProcess]:
    with RedisProcess(bind="::1") as server:
        yield server


@pytest.fixture(params=["memory", "file", "redis", "redis6"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Remote]:
    if request.param == "memory":
        yield MemoryRemote()
        return
    is_file = request.param == "file"
    url = f"file://{tmp_path}/kv" if is_file else request.getfixturevalue(request.param).url
    opened = open_remote(url, DEADLINE_S)
    yield opened
    opened.close()


def name(i: int) -> str:
    return f"{i:064x}"


def data(i: int, size: int = 5000) -> bytes:
    return random.Random(i).randbytes(size)


def put(remote: Remote, i: int, value: bytes) -> None:
    remote.put(name(i), memoryview(value))


def got(remote: Remote, i: int, size: int = 5000) -> bytes | None:
    """The value, None where there is none; nothing beside the buffer was written."""
    space = bytearray(GUARD + bytes(size) + GUARD)
    read = remote.get(name(i), memoryview(space)[64 : 64 + size])
    assert space[:64] == GUARD == space[-64:]
    assert read in (0, size)
    return bytes(space[64 : 64 + size]) if read else None


@pytest.mark.parametrize("size", [1, 4096, 737280 + 4096, 5 << 20])
def test_a_value_comes_back_byte_for_byte(remote: Remote, size: int) -> None:
    put(remote, 1, data(1, size))
    assert got(remote, 1, size) == data(1, size)


def test_a_value_is_put_again_and_replaced_by_way_of_delete(remote: Remote) -> None:
    put(remote, 2, data(2))
    put(remote, 2, data(2))
    assert got(remote, 2) == data(2)
    remote.delete(name(2))
    put(remote, 2, data(3, 6000))
    assert got(remote, 2, 6000) == data(3, 6000)


def test_an_absent_value_is_answered_at_once_and_what_follows_is_right(remote: Remote) -> None:
    put(remote, 3, data(3))
    assert got(remote, 90) is None
    assert got(remote, 3) == data(3)


def test_keys_are_present_until_they_are_deleted(remote: Remote) -> None:
    put(remote, 4, data(4))
    put(remote, 5, data(5))
    assert remote.has([name(4), name(91), name(5)]) == [True, False, True]
    remote.delete(name(4))
    remote.delete(name(4))
    assert remote.has([name(4), name(5)]) == [False, True]
    assert got(remote, 4) is None
    assert remote.has([]) == []


def test_a_shorter_value_is_damaged_and_the_others_are_not(remote: Remote) -> None:
    """What a connection still has of such a value is no answer to the next call."""
    put(remote, 6, data(6))
    put(remote, 7, data(7, 4999))
    with pytest.raises(DamagedValue, match="delete it"):
        got(remote, 7)
    assert got(remote, 6) == data(6)
    assert remote.has([name(7), name(92)]) == [True, False]
    remote.delete(name(7))
    assert got(remote, 7) is None


def test_a_longer_value_never_leaves_the_buffer(remote: Remote) -> None:
    put(remote, 8, data(8, 9000))
    put(remote, 9, data(9))
    with contextlib.suppress(DamagedValue):
        assert got(remote, 8) == data(8, 9000)[:5000]
    assert got(remote, 9) == data(9)


def test_a_read_only_buffer_is_refused(remote: Remote) -> None:
    put(remote, 10, b"abc")
    with pytest.raises(ValueError, match="read-only"):
        remote.get(name(10), memoryview(b"xyz"))


def test_many_values_are_each_their_own(remote: Remote) -> None:
    for i in range(100, 164):
        put(remote, i, data(i))
    for i in random.Random(0).sample(range(100, 164), 64):
        assert got(remote, i) == data(i)


def test_call_after_close_connects_anew_or_finds_nothing(remote: Remote) -> None:
    put(remote, 11, data(11))
    remote.close()
    assert got(remote, 11) in (data(11), None)
    remote.close()
    remote.close()


@pytest.mark.parametrize(
    "url", ["", "http://a", "redis://", "redis://h/3", "rediss://h", "file://host/x", "file:x", "memory"]
)
def test_an_unknown_url_is_refused(url: str) -> None:
    with pytest.raises(SetupError, match="use redis://"):
        open_remote(url)


def test_the_password_is_not_in_the_error() -> None:
    with pytest.raises(SetupError) as refused:
        open_remote("redis://me:secret@host/7")
    assert "secret" not in refused.value.message


@pytest.mark.parametrize("bind", ["127.0.0.1", "::1"])
def test_refused_login_is_an_error_that_names_it(bind: str) -> None:
    with RedisProcess(bind=bind, requirepass="right") as server:
        for login in ("", ":wrong@", "user:wrong@", "user:right@"):
            refused = open_remote(server.url.replace("//", f"//{login}"), DEADLINE_S)
            for call in (lambda to: to.has([name(1)]), lambda to: put(to, 1, data(1)), lambda to: got(to, 1)):
                with pytest.raises(RemoteError, match=r"redis refuses the user or password of `l2`"):
                    call(refused)
            refused.close()
        let_in = open_remote(server.url.replace("//", "//:right@"), DEADLINE_S)
        put(let_in, 1, data(1))
        assert got(let_in, 1) == data(1)
        let_in.close()
