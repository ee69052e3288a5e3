"""A real redis-server for tests: on a free port, without files, that can be frozen, killed and restarted."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess


def free_port() -> int:
    """A port without a listener now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisProcess:
    """Started and ready when made, stopped at the end of `with`. `options` are its own, undashed."""

    def __init__(self, **options: str) -> None:
        self.port = free_port()
        self._options = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "save": "",
            "appendonly": "no",
            **options,
        }
        self.start()

    def __enter__(self) -> RedisProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.thaw()
        self.stop()

    @property
    def url(self) -> str:
        host = self._options["bind"]
        return f"redis://[{host}]:{self.port}" if ":" in host else f"redis://{host}:{self.port}"

    def start(self) -> None:
        """Start, again after `stop`, and wait until it serves."""
        program = shutil.which("redis-server")
        assert program, "redis-server is not installed: apt-get install redis-server"
        words = [word for name, value in self._options.items() for word in (f"--{name}", value)]
        self._process = subprocess.Popen([program, *words], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout
        for line in self._process.stdout:
            if "Ready to accept connections" in line:
                return
        raise AssertionError("redis-server ended before it was ready")

    def freeze(self) -> None:
        """No answer from now on, with all connections open."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """It answers again, also what it was asked meanwhile."""
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """kill -9: connections break, values are lost. Again does nothing."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout
        self._process.stdout.close()
