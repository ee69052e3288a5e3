"""Every process takes its ports, its list of logits processors, its log and its secret files from here."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from shared.errors import SetupError

HTTP = "set `http` to another host:port, or to off"  # of the gateway
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # where whoever listens everywhere is found

PROCESSOR_NAME = r"^[A-Za-z0-9_.-]{1,64}$"
_TARGET = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")

ROOT = "headrace"


def bind(
    host: str, port: int, who: str = "the gateway", mend: str = HTTP, *, listen: bool = True
) -> socket.socket:
    """A bound socket; port 0 is any free one. Raises SetupError when it is taken or not of this machine;
    `who` wants it, `mend` says what to set then.

    Without `listen` it only holds the port: whoever binds it here may listen on it, on Linux, and nobody is
    given it as any free one."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _refused(host, port, error, who, mend) from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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


def open_private(path: Path, buffering: int = -1) -> BinaryIO:
    """A new file that its owner alone may read and write, whatever the umask. Raises OSError."""
    return open(path, "xb", buffering, opener=lambda name, flags: os.open(name, flags, 0o600))


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
