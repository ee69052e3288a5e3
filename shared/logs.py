"""Logging of every process: one line an event, for people or as JSON, with the component's name."""

from __future__ import annotations

import json
import logging
import sys
import time

ROOT = "headrace"


def setup(component: str, *, level: str = "info", as_json: bool = False) -> None:
    """Send the log of this process to stderr. Calling again replaces the earlier set-up."""
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
