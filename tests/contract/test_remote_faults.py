"""The remote store when redis-server is frozen, killed, restarted, full or refuses: an error in time, no
late write into our memory, and the next call works once the server does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from support.redis_process import RedisProcess, free_port

from services.kv_offload.backends.interface import DamagedValue, RefusedWrite, RemoteError, open_remote

SIZE = 300_000
DATA = bytes(i % 251 for i in range(SIZE))
SHORT_S = 0.3


@pytest.fixture
def redis() -> Iterator[RedisProcess]:
    with RedisProcess() as server:
        yield server


def test_a_frozen_server_costs_the_deadline_and_never_writes_late(redis: RedisProcess) -> None:
    remote = open_remote(redis.url, SHORT_S)
    remote.put("aa", memoryview(DATA))
    space = bytearray(SIZE)
    redis.freeze()
    for call in (
        lambda: remote.get("aa", memoryview(space)),
        lambda: remote.put("bb", memoryview(DATA)),
        lambda: remote.has(["aa"]),
        lambda: remote.delete("aa"),
    ):
        with pytest.raises(RemoteError, match=r"no answer within 0\.3 s"):
            call()
    redis.thaw()
    patient = open_remote(redis.url, 60.0)
    assert patient.has(["aa", "cc"])[1] is False  # the server answered: what it owed before is sent as well
    assert space == bytes(SIZE)
    patient.put("cc", memoryview(DATA))
    assert patient.get("cc", memoryview(space)) == SIZE
    assert space == DATA
    patient.close()
    remote.close()


def test_a_get_frozen_halfway_leaves_the_buffer_alone_afterwards(redis: RedisProcess) -> None:
    """The name is known to exist, so the wait is inside the read itself."""
    remote = open_remote(redis.url, SHORT_S)
    remote.put("aa", memoryview(DATA))
    redis.freeze()
    space = bytearray(SIZE)
    remote._redis.length = lambda key, end: SIZE  # type: ignore  # answered before
    with pytest.raises(RemoteError, match="no answer"):
        remote.get("aa", memoryview(space))
    space[:] = b"\x07" * SIZE
    redis.thaw()
    other = open_remote(redis.url, 60.0)
    assert other.has(["aa"]) == [True]
    assert space == b"\x07" * SIZE
    other.close()
    remote.close()


def test_a_killed_server_is_an_error_and_a_restarted_one_is_used(redis: RedisProcess) -> None:
    remote = open_remote(redis.url, 60.0)
    remote.put("aa", memoryview(DATA))
    redis.stop()
    for _ in range(3):
        with pytest.raises(RemoteError):
            remote.has(["aa"])
    redis.start()
    assert remote.has(["aa"]) == [False]  # it keeps nothing on disk
    remote.put("aa", memoryview(DATA))
    space = bytearray(SIZE)
    assert remote.get("aa", memoryview(space)) == SIZE
    assert space == DATA
    remote.close()


@pytest.fixture
def small_redis() -> Iterator[RedisProcess]:
    with RedisProcess(maxmemory="4mb", **{"maxmemory-policy": "noeviction"}) as server:
        yield server


def test_a_full_server_refuses_and_serves_what_it_has(small_redis: RedisProcess) -> None:
    remote = open_remote(small_redis.url, 60.0)
    stored: list[str] = []
    with pytest.raises(RefusedWrite, match="takes no value: redis answers OOM command not allowed"):
        for i in range(100):
            remote.put(f"{i:02x}", memoryview(DATA))
            stored.append(f"{i:02x}")
    assert 1 <= len(stored) < 20
    space = bytearray(SIZE)
    assert remote.has([*stored, "ff"]) == [True] * len(stored) + [False]
    assert remote.get(stored[0], memoryview(space)) == SIZE
    assert space == DATA
    for each in stored:
        remote.delete(each)
    remote.put("aa", memoryview(DATA))
    assert remote.has(["aa", stored[0]]) == [True, False]
    remote.close()


def test_a_replica_is_read_and_refuses_writes_in_its_words(redis: RedisProcess) -> None:
    remote = open_remote(redis.url, 60.0)
    remote.put("aa", memoryview(DATA))
    with Redis(port=redis.port) as other:
        other.replicaof("127.0.0.1", "1")
        with pytest.raises(RefusedWrite, match="redis answers READONLY You can't write"):
            remote.put("bb", memoryview(DATA))
        with pytest.raises(RemoteError, match="did not delete aa: it may be read-only"):
            remote.delete("aa")
        assert remote.get("aa", memoryview(bytearray(SIZE))) == SIZE
    remote.close()


def test_a_server_without_a_free_connection_is_not_a_wrong_password() -> None:
    with RedisProcess(maxclients="1") as redis, Redis(port=redis.port) as other:
        other.ping()
        with pytest.raises(RemoteError, match="redis answers ERR max number of clients reached"):
            open_remote(redis.url, 60.0).has(["aa"])


@pytest.mark.parametrize("value", [b"", b"x", b"not ours", DATA[:-1], DATA + b"x"])
def test_a_value_of_another_length_is_damaged_at_once(redis: RedisProcess, value: bytes) -> None:
    """Also one shorter than the line with its length. A wait would run into the time limit."""
    remote = open_remote(redis.url, 600.0)
    remote.put("aa", memoryview(DATA))
    with Redis(port=redis.port) as other:
        (name,) = other.keys()
        other.set(name, value)
        with pytest.raises(DamagedValue, match="delete it"):
            remote.get("aa", memoryview(bytearray(SIZE)))
        other.delete(name)
        other.lpush(name, "a list")
        with pytest.raises(DamagedValue, match="delete it"):
            remote.get("aa", memoryview(bytearray(SIZE)))
    remote.delete("aa")
    assert remote.get("aa", memoryview(bytearray(SIZE))) == 0
    remote.close()


def test_absent_server_is_an_error_at_once() -> None:
    remote = open_remote(f"redis://127.0.0.1:{free_port()}", 60.0)
    with pytest.raises(RemoteError, match="Is it running"):
        remote.put("aa", memoryview(DATA))
    remote.close()


def test_password_opens_the_server_and_a_wrong_one_is_an_error() -> None:
    with RedisProcess(requirepass="secret/1") as redis:
        right = open_remote(f"redis://:secret%2F1@127.0.0.1:{redis.port}", 60.0)
        right.put("aa", memoryview(DATA))
        assert right.has(["aa"]) == [True]
        for login in ("", ":wrong@"):
            with pytest.raises(RemoteError):
                open_remote(f"redis://{login}127.0.0.1:{redis.port}", SHORT_S).has(["aa"])
        right.close()


def test_a_folder_that_cannot_be_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    remote = open_remote(f"file://{tmp_path}/file/kv", 60.0)
    with pytest.raises(RemoteError, match="cannot be reached"):
        remote.has(["aa"])
