"""A Unix socket: made, replaced if nothing listens, refused otherwise, removed only if it is still ours."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from shared.errors import SetupError
from shared.processes import UnixListener, unix_url


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "http.sock"


@pytest.fixture
def listener(path: Path) -> Iterator[UnixListener]:
    made = UnixListener(str(path))
    with closing(made.socket):
        yield made


def connect(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_a_client_connects_and_the_file_goes_at_the_end(path: Path, listener: UnixListener) -> None:
    connect(path)
    path.chmod(0o666)
    listener.check()  # other rights leave it ours
    listener.remove()
    listener.remove()
    assert not path.exists()


def test_a_file_on_which_nothing_listens_is_replaced(path: Path) -> None:
    with closing(UnixListener(str(path)).socket):
        pass
    assert path.is_socket()
    with pytest.raises(ConnectionRefusedError):
        connect(path)
    with closing(UnixListener(str(path)).socket):
        connect(path)


def test_a_listener_is_left_alone(path: Path, listener: UnixListener) -> None:
    with pytest.raises(SetupError, match=rf"{path} \(another process listens there\): set `http`"):
        UnixListener(str(path))
    listener.socket.listen(0)
    with socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX) as two:
        for client in (one, two):
            client.setblocking(False)
            client.connect_ex(str(path))  # its queue is full now
        with pytest.raises(SetupError, match="another process listens there"):
            UnixListener(str(path))
    listener.check()


def test_other_files_and_places_are_refused(path: Path, tmp_path: Path) -> None:
    path.write_text("precious")
    with pytest.raises(SetupError, match="there is a file that is no socket"):
        UnixListener(str(path))
    assert path.read_text() == "precious"
    with pytest.raises(SetupError, match="No such file or directory"):
        UnixListener(str(tmp_path / "none" / "http.sock"))
    with pytest.raises(SetupError, match="path too long"):
        UnixListener(str(tmp_path / ("x" * 120)))


def test_a_later_socket_at_the_same_place_is_not_removed(path: Path, listener: UnixListener) -> None:
    path.unlink()
    with pytest.raises(SetupError, match="was removed or replaced"):
        listener.check()
    other = UnixListener(str(path))
    with closing(other.socket), pytest.raises(SetupError, match="was removed or replaced"):
        listener.remove()
        assert path.is_socket()
        os.chmod(path, 0o600)
        other.check()
        listener.check()


def test_unix_sockets_url_has_the_path_as_the_host() -> None:
    assert unix_url("/run/a b.sock") == "http+unix://%2Frun%2Fa%20b.sock"
    assert unix_url("/x", tls=True) == "https+unix://%2Fx"
