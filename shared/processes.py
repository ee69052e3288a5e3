"""Every process takes its ports, list of logits processors, log, secret files and children from here."""

from __future__ import annotations

import json
import logging
import os
import re
import site
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from shared.clock import Clock
from shared.errors import SetupError

HTTP = "set `http` to another host:port, or to off"  # of the gateway
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # where whoever listens everywhere is found

PROCESSOR_NAME = r"^[A-Za-z0-9_.-]{1,64}$"
_TARGET = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")

ROOT = "headrace"
RARELY_US = 60_000_000


def bind(
    host: str,
    port: int,
    who: str = "the gateway",
    mend: str = HTTP,
    *,
    listen: bool = True,
    shared: bool = False,
) -> socket.socket:
    """A bound socket; port 0 is any free one. Raises SetupError when it is taken or not of this machine;
    `who` wants it, `mend` says what to set then.

    Without `listen` it only holds the port: whoever binds it here may listen on it, on Linux, and nobody is
    given it as any free one. With `shared` several processes of this user may listen on it, the kernel gives
    each connection to one."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _refused(host, port, error, who, mend) from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
        if listen:
            bound.listen(1)  # two may be bound with SO_REUSEADDR; only one can listen
    except OSError as error:
        bound.close()
        raise _refused(host, port, error, who, mend) from None
    return bound


def http_url(host: str, port: int) -> str:
    """How a client on this machine calls it."""
    host = _ANY.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _refused(host: str, port: int, error: OSError, who: str, mend: str) -> SetupError:
    why = error.strerror or str(error)
    return SetupError(f"{who} cannot listen on {host}:{port} ({why}): free the port, or {mend}")


def processor_targets(setting: str) -> Mapping[str, str]:
    """The logits processors that a fleet offers: `name=module:attribute,...` as {name: "module:attribute"}.
    Raises SetupError.

    The setting `logits_processors` is read by tokenizers (names) and executors (code) alike. A request can
    only name what is listed there.
    """
    targets: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in setting.split(","))):
        name, _, target = (part.strip() for part in entry.partition("="))
        if not re.fullmatch(PROCESSOR_NAME, name) or not _TARGET.fullmatch(target):
            raise SetupError(
                f"logits_processors: {entry!r:.120} is not name=module:attribute; write for example "
                "no_digits=my_package.processors:NoDigits"
            )
        if name in targets:
            raise SetupError(f"logits_processors: {name!r} is listed twice; rename one")
        targets[name] = target
    return targets


def ensure_home() -> None:
    """Give a process whose user has no home, neither by HOME nor by the passwd entry, one below the folder
    for temporary files, and a name: libraries ask for both. Raises SetupError."""
    try:
        Path.home()
        return
    except RuntimeError:
        home = Path(tempfile.gettempdir()) / f"headrace-home-{os.getuid()}"
    try:
        home.mkdir(mode=0o700, exist_ok=True)
        owner = home.lstat().st_uid
    except OSError as error:
        raise SetupError(f"this user has no home folder, and none can be made ({error}): set HOME") from None
    if owner != os.getuid():
        raise SetupError(f"this user has no home folder, and {home} is another user's: set HOME")
    os.environ["HOME"] = str(home)
    os.environ.setdefault("USER", str(os.getuid()))


def module_command(module: str, *args: str) -> list[str]:
    """Runs a module of ours in a process of its own, which imports nothing from the working directory (-P): a
    file there may have any name. For an environment of `with_import_path`."""
    return [sys.executable, "-P", "-m", module, *args]


def with_import_path(env: Mapping[str, str]) -> dict[str, str]:
    """`env` with a PYTHONPATH on which a child finds the code that runs here, then what is there already: the
    user's processors. Empty entries, which stand for the working directory, go."""
    root = str(Path(__file__).resolve().parents[1])
    entries = [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if root not in (
        *entries,
        *site.getsitepackages(),
        site.getusersitepackages(),
    ):  # there it is found anyway
        entries.insert(0, root)
    return {**env, "PYTHONPATH": os.pathsep.join(entries)}


def open_private(path: Path, buffering: int = -1) -> BinaryIO:
    """A new file that its owner alone may read and write, whatever the umask. Raises OSError."""
    return open(path, "xb", buffering, opener=lambda name, flags: os.open(name, flags, 0o600))


class Rarely:
    """A warning that a stranger may cause at will: logged once in RARELY_US, with how often it came."""

    def __init__(self, log: logging.Logger, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._next_us = 0
        self._kept_back = 0

    def warning(self, text: str, *args: object) -> None:
        """Log it, unless one was logged a short time ago."""
        now_us = self._clock.now_us()
        if now_us < self._next_us:
            self._kept_back += 1
            return
        more = f"; {self._kept_back} more like it since the last line" if self._kept_back else ""
        self._log.warning(f"{text}{more}", *args)
        self._next_us, self._kept_back = now_us + RARELY_US, 0


def setup(component: str, *, level: str = "info", as_json: bool = False) -> None:
    """Send the log of this process to stderr: one line an event, for people or as JSON, with the component's
    name. Calling again replaces the earlier set-up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines(component) if as_json else _Lines(component))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger(ROOT).setLevel(level.upper())


class _Lines(logging.Formatter):
    """`07:31:02.118 scheduler warning: text`, with the traceback below."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        mark = "" if record.levelno == logging.INFO else f" {record.levelname.lower()}"
        who = f" {self._component}" if self._component else ""  # empty: the reader knows whose log it is
        line = f"{clock}.{int(record.msecs):03d}{who}{mark}: {record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _JsonLines(logging.Formatter):
    """One JSON object a line."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        row: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "component": self._component,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            row["exception"] = self.formatException(record.exc_info)
        return json.dumps(row, ensure_ascii=False)
