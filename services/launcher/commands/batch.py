"""`headrace batch run IN OUT` answers a file of requests, in the format of OpenAI's Batch API.

shared/openai/batch_lines.py has the format of their lines. The whole of IN is checked before the first
request. Requests have the class `batch` unless they name another: they use what other requests leave free.

OUT survives any end: `--resume` drops a line that was cut off, and the lines of refused requests, and sends
only the requests that have no answer yet. The file OUT.input has the checksum of IN until all are answered.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

from services.launcher import console
from services.launcher.session import Target, connected
from shared.client import Client
from shared.errors import BadRequest, HeadraceError, Overloaded, SetupError, Unavailable
from shared.openai.batch_lines import BatchLine, InputCheck, answered, read_line, refused

SYNC_S = 1.0  # at most so much work is done again after a loss of power
FIRST_WAIT_S, LAST_WAIT_S = 1.0, 15.0  # before a request is sent again that found a full queue or no service
REPORT_S = 10.0  # between two lines of progress where there is no terminal

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Line:
    """One request of the input file, by its place there."""

    custom_id: str
    start: int
    size: int


@dataclass(slots=True)
class Progress:
    """What has been done."""

    total: int
    done: int = 0
    refused: int = 0
    tokens: int = 0
    started_s: float = field(default_factory=time.monotonic)
    before: int = 0  # done by an earlier run

    def text(self) -> str:
        """One line for people."""
        elapsed_s = max(time.monotonic() - self.started_s, 1e-3)
        here = self.done - self.before
        still = self.total - self.done
        left = f", {_duration(elapsed_s / here * still)} left" if here and still else ""
        refused = f", {self.refused:,} refused" if self.refused else ""
        rate = f"{self.tokens / elapsed_s:,.0f} tokens/s"
        return f"{self.done:,} of {self.total:,} requests{refused}, {rate}{left}"


async def run_batch(
    target: Target, given: Path, out: Path, *, resume: bool, window: int, timeout_s: float
) -> int:
    """Answer the requests of `given` in `out`. Returns the number of refused requests. Raises BadRequest for
    an input that is not right, SetupError for files that cannot be used."""
    if window < 1:
        raise BadRequest(f"--window takes a number of requests from 1 on, not {window}")
    with _open(given, "rb") as source:
        lines, checksum = read_input(source)
        answered = _prepare(out, checksum, {line.custom_id for line in lines}, resume=resume)
        progress = Progress(len(lines), done=len(answered), before=len(answered))
        todo = iter([line for line in lines if line.custom_id not in answered])
        async with connected(target.nats_url) as bus, _kept(out, progress) as sink:
            client = await Client.open(bus, target.tenant)
            try:
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(min(window, len(lines))):
                        work = _work(client, target.model, source, todo, sink, progress, timeout_s)
                        tasks.create_task(work)
            except* SetupError as errors:
                raise errors.exceptions[0] from None
    if not progress.refused:
        _note(out).unlink(missing_ok=True)
    print(progress.text(), file=sys.stderr)
    return progress.refused


def read_input(source: IO[bytes]) -> tuple[list[Line], str]:
    """The requests of an input file, and its checksum. Raises BadRequest with the number of a wrong line."""
    lines, check, digest, start = list[Line](), InputCheck(), sha256(), 0
    for raw in source:
        digest.update(raw)
        if (line := check.read(raw)) is not None:
            lines.append(Line(line.custom_id, start, len(raw)))
        start += len(raw)
    if not lines:
        raise BadRequest("the input has no requests: each line is one JSON object")
    return lines, digest.hexdigest()


def _prepare(out: Path, checksum: str, known: set[str], *, resume: bool) -> set[str]:
    """Make `out` ready to be appended to. Returns the ids that it has answers for."""
    note = _note(out)
    try:
        if not out.exists():
            note.write_text(checksum)
            return set()
        if not resume:
            raise SetupError(f"{out} exists: continue it with --resume, or name another file")
        if note.exists() and note.read_text() != checksum:
            raise SetupError(f"{out} has answers to another input: the file or its content has changed")
        answered = set[str]()
        draft = out.with_name(f"{out.name}.draft")
        with draft.open("wb") as kept:
            for custom_id, raw in _answers(out):
                if custom_id not in known:
                    draft.unlink()
                    raise SetupError(f"{out} has an answer to {custom_id!r:.80}, which is not in the input")
                answered.add(custom_id)
                kept.write(raw)
            kept.flush()
            os.fsync(kept.fileno())
        note.write_text(checksum)
        draft.replace(out)
    except OSError as error:
        raise SetupError(f"{out} cannot be used: {error.strerror}") from None
    return answered


def _answers(out: Path) -> Iterator[tuple[str, bytes]]:
    """The whole lines of successful requests, by their id; any other line is left out."""
    with out.open("rb") as lines:
        for raw in lines:
            try:
                fields = json.loads(raw)
                if raw.endswith(b"\n") and fields["response"]["status_code"] == 200:
                    yield str(fields["custom_id"]), raw
            except (ValueError, KeyError, TypeError):
                continue


def _note(out: Path) -> Path:
    return out.with_name(f"{out.name}.input")


def _open(path: Path, mode: str) -> IO[bytes]:
    try:
        return path.open(mode, buffering=0 if mode == "ab" else -1)  # appended lines are whole
    except OSError as error:
        raise SetupError(f"{path} cannot be opened: {error.strerror}") from None


@asynccontextmanager
async def _kept(out: Path, progress: Progress) -> AsyncGenerator[IO[bytes]]:
    """The file to append to. During the block its lines reach the disk, and the progress is shown."""
    with _open(out, "ab") as sink, console.StatusLine(sys.stderr) as status:
        keeping = asyncio.get_running_loop().create_task(_keep(sink, progress, status))
        try:
            yield sink
        except asyncio.CancelledError:
            print(f"{progress.text()}; --resume continues", file=sys.stderr)
            raise
        finally:
            keeping.cancel()
            _put(sink)


async def _keep(sink: IO[bytes], progress: Progress, status: console.StatusLine) -> None:
    quiet, told_s = not console.is_terminal(sys.stderr), time.monotonic()
    while True:
        await asyncio.sleep(SYNC_S)
        _put(sink)
        status.show(progress.text())
        if quiet and time.monotonic() - told_s >= REPORT_S:
            told_s = time.monotonic()
            print(progress.text(), file=sys.stderr, flush=True)


def _put(sink: IO[bytes], line: bytes | None = None) -> None:
    """Append `line`; without one, have what was appended reach the disk. Raises SetupError."""
    try:
        if line is not None:
            if sink.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return
        os.fsync(sink.fileno())
    except OSError as error:
        raise SetupError(f"{sink.name} cannot be written: {error.strerror}; --resume continues") from None


async def _work(
    client: Client,
    model: str,
    source: IO[bytes],
    todo: Iterator[Line],
    sink: IO[bytes],
    progress: Progress,
    timeout_s: float,
) -> None:
    """Answer one request after the other until none is left."""
    for line in todo:
        source.seek(line.start)
        written = await _ask(client, model, read_line(source.read(line.size)), timeout_s)
        _put(sink, json.dumps(written, ensure_ascii=False).encode() + b"\n")
        response = written["response"]
        progress.done += 1
        progress.refused += response["status_code"] != 200
        usage = response["body"].get("usage", {})
        progress.tokens += usage.get("completion_tokens", usage.get("output_tokens", 0))


async def _ask(client: Client, model: str, line: BatchLine, timeout_s: float) -> Body:
    """The output line of a request. While a queue is full, or a service is away, it is sent again."""
    wait_s = FIRST_WAIT_S
    while True:
        call = line.call(os.urandom(12).hex(), {"model": model, "slo_class": "batch"})
        try:
            whole = [await client.complete(each, timeout_s=timeout_s) for each in call.bodies]
            return answered(call, whole, line.custom_id)
        except (Overloaded, Unavailable) as error:
            await asyncio.sleep(max(wait_s, error.retry_after_ms / 1000))
            wait_s = min(2 * wait_s, LAST_WAIT_S)
        except HeadraceError as error:
            return refused(error, call.request_id, line.custom_id)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds:02} s"
