"""`AccessLog` writes a line of JSON for each HTTP request: client, result, times, tokens.

`ExchangeMiddleware` calls it after the last byte of an answer. Prompts and answers are left out; a setting
adds the body of the request. Invariant: a file that cannot be written costs lines of the log, never a
request.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from typing import Any

from services.gateway.exchange import Exchange
from shared.errors import SetupError
from shared.openai.whole_answer import total
from shared.replies import to_json

log = logging.getLogger("headrace.gateway")

STDOUT = "-"
MAX_AGENT_CHARS = 256  # of a client's own header


class AccessLog:
    """The access log of one gateway. A file that was moved, as logrotate does it, is opened again."""

    def __init__(self, target: str, *, prompts: bool = False) -> None:
        """`target` is a file, or STDOUT; `prompts` adds the bodies of requests. Raises SetupError."""
        self.prompts = prompts
        self._target, self._lost = target, 0
        try:
            self._handler: logging.Handler = (
                logging.StreamHandler(sys.stdout) if target == STDOUT else WatchedFileHandler(target)
            )
        except OSError as error:
            raise SetupError(f"access_log: {target} cannot be written: {error}") from None
        self._handler.handleError = self._on_error  # type: ignore[method-assign]  # else a traceback a line

    def write(self, line: Mapping[str, Any], body: Mapping[str, Any] | None = None) -> None:
        """Write the line of a request that has ended (`line_of`), with the body of the request if given."""
        lost = self._lost
        text = to_json(line if body is None else {**line, "body": body}).decode()
        self._handler.handle(logging.LogRecord("access", logging.INFO, "", 0, text, None, None))
        if lost and lost == self._lost:
            log.info("access_log: %s is written again; %d lines are lost", self._target, lost)
            self._lost = 0

    def close(self) -> None:
        """Close the file."""
        self._handler.close()

    def _on_error(self, record: logging.LogRecord) -> None:
        if not self._lost:
            log.error("access_log: %s cannot be written: %s", self._target, sys.exc_info()[1])
        self._lost += 1


def line_of(exchange: Exchange, now_us: int = 0) -> dict[str, Any]:
    """The fields of a line. Times are milliseconds; a field that a request does not have is left out.
    `now_us`: the time of the clock, for a request that has not ended."""
    line: dict[str, Any] = {
        "time": datetime.fromtimestamp(exchange.started_us / 1e6, UTC).isoformat(timespec="milliseconds"),
        "client": exchange.client,
        "tenant": exchange.tenant,
        "method": exchange.method,
        "path": exchange.route,
        "status": exchange.status,
        "request_id": exchange.request_id,
        "model": exchange.model,
        "stream": exchange.stream,
        "duration_ms": _ms(max((exchange.ended_us or now_us) - exchange.started_us, 0)),
        "first_chunk_ms": _ms(exchange.first_us - exchange.started_us) if exchange.first_us else None,
        "error": exchange.error.type if exchange.error is not None else None,
        "user_agent": exchange.agent[:MAX_AGENT_CHARS],
        "traceparent": exchange.trace,
    }
    if exchange.usages:
        usage = total(exchange.usages)
        line |= {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
        line["cached_tokens"] = usage["prompt_tokens_details"]["cached_tokens"]
    return {name: value for name, value in line.items() if value not in (None, "")}


def _ms(us: int) -> float:
    return round(us / 1000, 1)
