"""`headrace batch submit|status|cancel|fetch|run`: batches that a keeper answers, over NATS.

`submit` uploads the file and prints the id of the batch; this command may then end, and the fleet, too. `run`
submits, waits and fetches.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from contextlib import suppress
from functools import partial
from hashlib import file_digest
from pathlib import Path
from typing import IO, Any

from services.launcher.console import StatusLine, actions_of, load
from services.launcher.session import Target, connected, find_target
from shared.client.client import Client
from shared.client.file_client import FileClient, asked
from shared.clock import SystemClock
from shared.errors import SetupError, Unavailable, UnknownRequest
from shared.nats import subjects
from shared.nats.interface import RequestTimeout
from shared.nats.object_store import CHUNK_BYTES, UnknownFile
from shared.openai.batch_lines import CANCELLED, COMPLETED, EXPIRED, FAILED, MAX_FILE_BYTES, read_line

Body = dict[str, Any]

BATCH_POLL_S = 2.0  # between two looks of `run`
ENDED = (COMPLETED, FAILED, CANCELLED, EXPIRED)


async def submit(
    target: Target, given: Path, endpoint: str | None = None, window: str = "24h", webhook: str | None = None
) -> str:
    """Upload a file and make a batch of it. Returns its id. `endpoint` None: that of the first line. Raises
    BadRequest, SetupError for a file that cannot be read, Unavailable without a keeper."""
    try:
        with given.open("rb") as source:
            if endpoint is None:
                lines = iter(partial(source.readline, MAX_FILE_BYTES), b"")  # any file may be given
                endpoint = read_line(next((raw for raw in lines if raw.strip()), b"")).url
                source.seek(0)
            async with connected(target.nats_url) as bus:
                client = await Client.open(bus, target.tenant)
                files = FileClient(client, SystemClock())
                described = {"filename": given.name[:255], "purpose": "batch"}
                file = await files.upload(_pieces(source), lambda: described)
                job = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": window}
                job |= {"webhook": webhook} if webhook is not None else {}
                made = await asked(client, subjects.batches(target.tenant, "create"), job)
    except OSError as error:
        raise SetupError(f"{given} cannot be read: {error.strerror}") from None
    return str(made["id"])


async def status(target: Target, batch: str, *, as_json: bool) -> int:
    """Print the state of a batch. Returns the exit status, 1 for one that has failed. Raises UnknownFile."""
    found = await _verb(target, "show", batch)
    _show(found, as_json=as_json)
    return 1 if found["status"] == FAILED else 0


async def cancel(target: Target, batch: str) -> None:
    """Cancel a batch; its answers so far are kept. Raises UnknownFile, BadRequest for one that has ended."""
    _show(await _verb(target, "cancel", batch), as_json=False)


async def fetch(target: Target, batch: str, out: Path) -> int:
    """Write the answers of a batch that has ended to `out`, then the errors of its refused requests. Returns
    their number. Raises UnknownFile, UnknownRequest for one that goes on, SetupError."""
    async with connected(target.nats_url) as bus:
        client = await Client.open(bus, target.tenant)
        found = await asked(client, subjects.batches(target.tenant, "show"), {"id": batch})
        wanted = [found[name] for name in ("output_file_id", "error_file_id") if found[name] is not None]
        if not wanted:
            _show(found, as_json=False)
            raise UnknownRequest(f"batch {batch} has no answers: it is {found['status']}")
        files, draft = FileClient(client, SystemClock()), out.with_name(f"{out.name}.draft")
        try:
            with draft.open("wb") as sink:
                for file in wanted:
                    _, chunks = await files.read(file)
                    async for chunk in chunks:
                        sink.write(chunk)
            draft.replace(out)
        except OSError as error:
            raise SetupError(f"{out} cannot be written: {error.strerror}") from None
    _show(found, as_json=False)
    return int(found["request_counts"]["failed"])


async def run(target: Target, given: Path, out: Path) -> int:
    """Submit a file, wait for the end of its batch and write its answers to `out`, which must not exist.
    Returns the number of refused requests. Meanwhile the file OUT.batch has the id: after a kill the same
    command goes on with that batch. Raises as `submit` and `fetch`, and SetupError for another input."""
    note = out.with_name(f"{out.name}.batch")
    try:
        batch, checksum = _begun(given, out, note)
        if not batch:
            batch = await submit(target, given)
            note.write_text(f"{batch} {checksum}")
    except OSError as error:
        raise SetupError(f"{error.filename} cannot be used: {error.strerror}") from None
    try:
        await _await_end(target, batch)
        refused = await fetch(target, batch, out)
    except (UnknownFile, UnknownRequest):  # it is gone, or has no answers
        note.unlink()
        raise
    note.unlink()
    return refused


def _begun(given: Path, out: Path, note: Path) -> tuple[str, str]:
    """The batch of an earlier run, "" for none, and the checksum of the input. Raises OSError, SetupError."""
    if out.exists():
        raise SetupError(f"{out} exists: name another file")
    with given.open("rb") as source:
        checksum = file_digest(source, "sha256").hexdigest()
    batch, _, of = note.read_text().partition(" ") if note.exists() else ("", "", checksum)
    if of != checksum:
        raise SetupError(f"{note} is of another input: fetch its batch, and remove it")
    return batch, checksum


async def _await_end(target: Target, batch: str) -> None:
    """Return once a batch has ended, also after the fleet was away. Raises UnknownFile."""
    async with connected(target.nats_url) as bus:
        client, news = await Client.open(bus, target.tenant), asyncio.Event()
        await bus.subscribe(subjects.done(target.tenant, batch), lambda _: news.set())
        with StatusLine(sys.stderr) as line:
            while True:
                with suppress(Unavailable, RequestTimeout):
                    found = await asked(client, subjects.batches(target.tenant, "show"), {"id": batch})
                    if found["status"] in ENDED:
                        return
                    line.show(f"{batch}: {_progress(found)}")
                with suppress(TimeoutError):
                    async with asyncio.timeout(BATCH_POLL_S):
                        await news.wait()
                news.clear()


async def _verb(target: Target, verb: str, batch: str) -> Body:
    async with connected(target.nats_url) as bus:
        client = await Client.open(bus, target.tenant)
        return await asked(client, subjects.batches(target.tenant, verb), {"id": batch})


async def _pieces(source: IO[bytes]) -> AsyncGenerator[bytes]:
    while piece := source.read(CHUNK_BYTES):
        yield piece


def _show(found: Body, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found, indent=2))
        return
    print(_progress(found), file=sys.stdout if found["status"] == COMPLETED else sys.stderr)
    for error in (found["errors"] or {"data": ()})["data"]:
        print(error["message"], file=sys.stderr)


def _progress(found: Body) -> str:
    counts = found["request_counts"]
    done, refused = counts["completed"], counts["failed"]
    of = f"{done + refused:,} of {counts['total']:,} requests" if counts["total"] else "no requests yet"
    return f"{found['status']}: {of}{f', {refused:,} refused' if refused else ''}"


def command(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    act = actions_of(parser)
    submit = act("submit", "store a file of requests that a keeper answers, and print the id of the batch")
    submit.add_argument("input", type=Path, metavar="IN.jsonl", help="a line for each request")
    submit.add_argument("--endpoint", metavar="PATH", help="of all lines; default: that of the first one")
    submit.add_argument(
        "--completion-window", default="24h", metavar="TIME", help="m, h or d, up to 7d; default 24h"
    )
    submit.add_argument("--webhook", metavar="URL", help="gets a signed event when the batch has ended")
    status = act("status", "the state of a batch")
    status.add_argument("id", help="the id that `submit` has printed")
    status.add_argument("--json", action="store_true", help="everything, as JSON")
    act("cancel", "cancel a batch; its answers so far are kept").add_argument("id")
    fetch = act("fetch", "write the answers of a batch that has ended to a file")
    fetch.add_argument("id")
    fetch.add_argument("output", type=Path, metavar="OUT.jsonl", help="answers, then errors")
    whole = act("run", "submit, wait and fetch; after a kill the same command goes on")
    whole.add_argument("input", type=Path, metavar="IN.jsonl", help="a line for each request")
    whole.add_argument("output", type=Path, metavar="OUT.jsonl", help="answers, then errors; must not exist")
    parser.set_defaults(run=_act)


def _act(given: argparse.Namespace) -> int:
    target = find_target(load(given), wait=True)
    if given.action == "submit":
        window = given.completion_window
        print(asyncio.run(submit(target, given.input, given.endpoint, window, given.webhook)))
        return 0
    if given.action == "status":
        return asyncio.run(status(target, given.id, as_json=given.json))
    if given.action == "cancel":
        asyncio.run(cancel(target, given.id))
        return 0
    if given.action == "fetch":
        return 1 if asyncio.run(fetch(target, given.id, given.output)) else 0
    return 1 if asyncio.run(run(target, given.input, given.output)) else 0
