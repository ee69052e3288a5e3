"""`Batches` runs the batches that one keeper holds: a core for each, calls to the streams and the fleet.

stream HR_WORK, a job ──▶ BatchCore ──generate──▶ tokenizer … detokenizer ──answer──▶ BatchCore
stream HR_FILES, the input file ──▶ ……… ──▶ records of lines ──▶ output and error file
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass

from services.keeper.batches import batch_core
from services.keeper.batches.batch_core import STATE_KEPT_S, WEBHOOK
from services.keeper.batches.batch_verbs import BatchVerbs, FileVerbs, file_object
from services.keeper.core import Ack, Key, Nak, Progress, age_at_first
from services.keeper.parts import Keeper, Part
from services.keeper.records import BATCH, Body, Hook
from services.keeper.verbs import reply_subject
from shared import bodies
from shared.errors import BadRequest, EngineError, HeadraceError, Unavailable, UnknownRequest, WireError
from shared.nats import subjects
from shared.nats.interface import Delivery, NoResponders, RequestTimeout
from shared.nats.jetstream import StreamFull, Taken, deliveries
from shared.nats.object_store import ObjectStore, lines_of, new_id
from shared.openai.batch_lines import InputCheck, read_line
from shared.telemetry.counters import Counted, KeeperCounter

log = logging.getLogger("headrace.keeper")

MAX_LINES = 50_000  # of a batch, as OpenAI has it
MAX_ERRORS = 100  # wrong lines that are named
MAX_BATCHES = 16  # that one keeper holds; others wait in the queue
FULL_DELAY_US = 5_000_000  # until a batch is delivered again that found no keeper
READ_BYTES = 1_048_576  # of lines read at a time
READERS = 16  # records on their way while a file is written
MODELS_US = 5_000_000  # far longer than a tokenizer takes

Line = tuple[int, bytes]


@dataclass(slots=True)
class _Held:
    """One batch of this keeper."""

    tenant: str
    core: batch_core.BatchCore
    reader: AsyncGenerator[Line] | None = None  # of lines without a record
    read_to: int = 0  # number of the last line that it gave
    look_us: int = 0  # for the next look whether it is cancelled
    looks: bool = False


class Batches(Part):
    """The batches of one keeper, and the files of its fleet."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper, self._bus, self._clock, self._away = keeper, keeper.bus, keeper.clock, keeper.away
        self._streams, self._aliases, self._here = keeper.streams, keeper.aliases, keeper.here
        self._store = ObjectStore(keeper.streams)
        self._files = FileVerbs(self._store, keeper.clock)
        self._held: dict[Key, _Held] = {}
        if self._here != frozenset():  # an edge without a model has none for batches: the centre answers
            batches = BatchVerbs(keeper, self._store)
            keeper.verbs |= {subjects.FILES_ALL: self._files.answer, subjects.BATCHES_ALL: batches.answer}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def in_flight(self) -> int:
        """Lines that were sent and have no record."""
        return sum(held.core.in_flight for held in self._held.values())

    async def make_streams(self) -> None:
        """Make the stream of files if it is missing."""
        try:
            await self._store.open(self._keeper.replicas)
        except StreamFull as error:  # durable requests need none
            self._away.warning("there is no store of files, and no batch: %s", error.message)

    @property
    def counted(self) -> Counted:
        return {KeeperCounter.BATCHES: len(self), KeeperCounter.BATCH_LINES: self.in_flight}

    def on_delivery(self, delivery: Delivery, age_us: int) -> bool:
        """The work queue delivers a batch that it has had for `age_us` by the clock of the store."""
        if not subjects.is_batch_job(delivery.subject):
            return False
        tenant = subjects.untoken(delivery.subject.split(".")[3])
        batch: Body = {**bodies.decode(bodies.Batch, delivery.data)}
        key = tenant, batch["id"]
        if (held := self._held.get(key)) is not None:  # the progress acks were late
            held.core.ack = delivery.reply
        elif len(self._held) >= MAX_BATCHES:
            self._streams.nak(delivery.reply, FULL_DELAY_US)
        else:
            core = batch_core.BatchCore(batch, delivery.reply, self._bus.max_payload)
            core.resolve = lambda name, request: self._model_of(name, tenant, request)
            held = self._held[key] = _Held(tenant, core)
            self._share()
            waited_us = age_at_first(age_us, deliveries(delivery.reply), FULL_DELAY_US)
            self._run(held, held.core.begin(self._clock.now_us(), waited_us))
        return True

    def _model_of(self, name: str, tenant: str, request: str) -> str:
        """The model for a line to an alias. An adapter answers under its own name, and the name of a model
        goes first."""
        alias = self._aliases.get(name)
        is_model = self._keeper.mailbox.peers.has_model(name)
        if is_model or (alias is not None and alias.adapter is not None):
            return name
        return self._aliases.resolve(name, tenant, request) or name

    def on_answered(self, key: Key, outcome: Body | HeadraceError, size: int) -> bool:
        """A service answered a request; False: it is none of a batch here."""
        tenant, request = key
        held = self._held.get((tenant, request.partition(".")[0]))
        if held is not None:
            self._handle(held, batch_core.LineAnswered(request, outcome, size))
        return held is not None

    def tick(self) -> None:
        """Time has passed."""
        now_us = self._clock.now_us()
        for held in [*self._held.values()]:
            if now_us >= held.look_us and not held.looks:
                held.look_us, held.looks = now_us + batch_core.SAVE_US, True
                self._keeper.spawn(self._look(held))
            self._handle(held, batch_core.BatchTick())
        self._keeper.spawn(self._files.sweep(now_us))

    def on_reconnected(self) -> None:
        """The nats-server was away."""
        for held in self._held.values():
            held.core.on_reconnected(self._clock.now_us())

    async def drain(self) -> None:
        """Have all batches delivered again, now: this keeper stops."""
        for held in [*self._held.values()]:
            self._run(held, held.core.give_back())
        self._held.clear()

    def _share(self) -> None:
        for held in self._held.values():
            held.core.share = max(batch_core.MOST_IN_FLIGHT // len(self._held), 1)

    def _handle(self, held: _Held, event: batch_core.BatchEvent) -> None:
        self._run(held, held.core.handle(event, self._clock.now_us(), self._clock.wall_us()))

    def _run(self, held: _Held, commands: Iterable[batch_core.BatchCommand]) -> None:
        for command in commands:
            match command:
                case Ack(reply):
                    self._keeper.ack(reply, _hook(held))
                case Nak(reply, delay_us):
                    self._streams.nak(reply, delay_us)
                case Progress(reply):
                    self._streams.progress(reply)
                case batch_core.AskLine(body):
                    reply = reply_subject(held.tenant, body["request_id"])
                    subject = subjects.generate(held.tenant, body["model"])
                    self._bus.publish(subject, bodies.encode(body), reply=reply)
                case batch_core.CancelLine(request):
                    self._bus.publish(subjects.cancel(held.tenant, request), b"")
                case batch_core.SaveState(batch):
                    self._keeper.spawn(self._save(held, batch))
                case batch_core.StoreLine():
                    self._keeper.spawn(self._store_line(held, command))
                case batch_core.Over():
                    self._leave(held, command)
                case _:
                    self._keeper.spawn(self._answer(held, command))

    def _leave(self, held: _Held, over: batch_core.Over) -> None:
        del self._held[held.tenant, held.core.id]
        if self._held:
            self._share()
        if over.status:
            news = bodies.Ended(id=held.core.id, status=over.status)
            self._bus.publish(subjects.done(held.tenant, held.core.id), bodies.encode(news))
        self._keeper.spawn(self._clean(held, over))

    # ---- calls with one result -------------------------------------------------------------------

    async def _answer(self, held: _Held, command: batch_core.Call_) -> None:
        event: batch_core.BatchEvent
        try:
            match command:
                case batch_core.OpenBatch():
                    event = await self._open(held)
                case batch_core.CheckFile():
                    event = await self._check(held)
                case batch_core.ReadLines(most):
                    event = await self._read(held, most)
                case batch_core.WriteFiles(unfinished):
                    event = await self._write(held, unfinished=unfinished)
                case batch_core.StoreEnd(batch):
                    event = await self._end(held, batch)
        except HeadraceError as error:
            self._away.warning("batch %s waits: %s", held.core.id, error.message)
            event = batch_core.CallFailed(error)
        except Exception as bug:  # it is tried again, so the batch never hangs
            log.exception("batch %s failed", held.core.id)
            event = batch_core.CallFailed(EngineError(f"the keeper failed: {bug!r:.80}"))
        self._handle(held, event)

    async def _open(self, held: _Held) -> batch_core.Opened:
        tenant, batch = held.tenant, held.core.id
        last, stream = self._streams.last, subjects.RECORD_STREAM
        ends = await self._ends(held)  # before the end is looked for: after it they are removed
        if await last(stream, subjects.batch_part(tenant, batch, "end")) is not None:
            return batch_core.Opened(ended=True)
        state = await last(stream, subjects.batch_part(tenant, batch, "state"))
        ok = [number for number, outcome in ends.items() if outcome == "ok"]
        failed = [number for number, outcome in ends.items() if outcome != "ok"]
        noted = {**bodies.decode(bodies.Batch, state)} if state is not None else None
        return batch_core.Opened(False, noted, ok, failed)

    async def _ends(self, held: _Held) -> dict[int, str]:
        """The lines with a record, each with its outcome."""
        pattern = subjects.batch_line(held.tenant, held.core.id, "*", "*")
        found = await self._streams.subjects_like(subjects.FILE_STREAM, pattern)
        return {int(number): outcome for _, number, outcome in (s.rsplit(".", 2) for s in found)}

    async def _check(self, held: _Held) -> batch_core.Checked:
        """Read the whole file, and all that is wrong with it."""
        batch = held.core.batch
        models, default = await self._models()
        check, errors, wrong = InputCheck(), list[Body](), 0
        try:
            async for raw in self._lines(held):
                error = _flaw(check, raw, batch["endpoint"], models, default)
                if error is not None:
                    wrong += 1
                    if wrong <= MAX_ERRORS:
                        errors.append(error)
                if check.requests > MAX_LINES:
                    errors = [
                        batch_core.error_entry(
                            "too_many_requests", f"a batch has at most {MAX_LINES:,} requests"
                        )
                    ]
                    break
        except ValueError as error:
            errors = [
                batch_core.error_entry("line_too_long", f"line {check.line + 1}: {error}", check.line + 1)
            ]
        if not check.requests and not errors:
            errors = [
                batch_core.error_entry("empty_file", "the file has no requests: each line is one JSON object")
            ]
        return batch_core.Checked(check.requests, default, tuple(errors))

    async def _models(self) -> tuple[set[str], str]:
        """The models that are served, and the one of lines without a model: the only one. Raises Unavailable
        if there is none."""
        try:
            answer = await self._bus.request(subjects.MODELS, b"", timeout_us=MODELS_US)
            served = bodies.decode(bodies.Models, answer.data)["data"]
            entries = [each for each in served if self._here is None or each["id"] in self._here]
        except (NoResponders, RequestTimeout, WireError):
            entries = []
        if not entries:
            raise Unavailable("no tokenizer serves a model now")
        roots = {entry.get("root", entry["id"]) for entry in entries}
        return {entry["id"] for entry in entries}, roots.pop() if len(roots) == 1 else ""

    async def _lines(self, held: _Held) -> AsyncGenerator[bytes]:
        """The lines of the input file. Raises UnknownFile, DamagedFile, ValueError for a line too long."""
        meta = await self._store.meta(held.tenant, held.core.batch["input_file_id"])
        chunks = self._store.read(held.tenant, meta)
        async with (
            contextlib.aclosing(chunks),
            contextlib.aclosing(lines_of(chunks, self._bus.max_payload)) as lines,
        ):
            async for line in lines:
                yield line

    async def _todo(self, held: _Held) -> AsyncGenerator[Line]:
        """The lines without a record, with their numbers from 1."""
        core, number = held.core, 0
        async with contextlib.aclosing(self._lines(held)) as lines:
            async for raw in lines:
                number += 1
                done = number <= held.read_to or number in core.ok or number in core.failed
                if not done and raw.strip():
                    yield number, raw

    async def _read(self, held: _Held, most: int) -> batch_core.LinesRead:
        reader = held.reader = held.reader or self._todo(held)
        lines, size, end = list[Line](), 0, True
        try:
            async for line in reader:
                lines.append(line)
                size += len(line[1])
                if len(lines) == most or size > READ_BYTES:
                    end = False
                    break
        except BaseException:
            held.reader = None  # the next one starts after the last line that was given
            raise
        held.read_to = lines[-1][0] if lines else held.read_to
        return batch_core.LinesRead(tuple(lines), end)

    async def _write(self, held: _Held, *, unfinished: bool) -> batch_core.Written:
        """The two files, in the order of the lines."""
        ends = await self._ends(held)
        failed = [number for number in sorted(ends) if ends[number] != "ok"]
        completed = [number for number in sorted(ends) if ends[number] == "ok"]
        never = [line async for line in self._unfinished(held, ends)] if unfinished else []
        output = await self._file(held, "output", self._records(held, completed, "ok")) if completed else None
        error = None
        if failed or never:

            async def errors() -> AsyncGenerator[bytes]:
                async for record in self._records(held, failed, "error"):
                    yield record
                for line in never:
                    yield line

            error = await self._file(held, "errors", errors())
        return batch_core.Written(output, error, len(completed), len(failed) + len(never))

    async def _records(self, held: _Held, numbers: list[int], outcome: str) -> AsyncGenerator[bytes]:
        """The records of lines, several on their way at a time."""
        for start in range(0, len(numbers), READERS):
            asked = [
                self._streams.last(
                    subjects.FILE_STREAM, subjects.batch_line(held.tenant, held.core.id, number, outcome)
                )
                for number in numbers[start : start + READERS]
            ]
            for record in await asyncio.gather(*asked):
                if record is None:  # another keeper has ended this batch
                    raise Unavailable("a record of a line is gone")
                yield record + b"\n"

    async def _unfinished(self, held: _Held, ends: dict[int, str]) -> AsyncGenerator[bytes]:
        """An error for each line without a record. A file that is gone or not valid has none."""
        number = 0
        why = {"code": "batch_expired", "message": "the completion window of the batch is over"}
        with contextlib.suppress(UnknownRequest, BadRequest, ValueError):
            async for raw in self._lines(held):
                number += 1
                if number not in ends and raw.strip():
                    name, custom_id = f"batch_req_{held.core.id}.{number}", read_line(raw).custom_id
                    line = {"id": name, "custom_id": custom_id, "response": None, "error": why}
                    yield bodies.encode(line) + b"\n"

    async def _file(self, held: _Held, what: str, pieces: AsyncGenerator[bytes]) -> str:
        core, now_us = held.core, self._clock.wall_us()
        kept_s = int(core.batch.get("_output_kept_s", bodies.FILE_KEPT_S))
        meta = file_object(new_id("file-", now_us), f"{core.id}_{what}.jsonl", "batch_output", now_us, kept_s)
        async with contextlib.aclosing(pieces):
            await self._store.write(held.tenant, meta, pieces, kept_s)
        return str(meta["id"])

    async def _end(self, held: _Held, batch: Body) -> batch_core.EndStored:
        try:
            subject = subjects.batch_part(held.tenant, held.core.id, "end")
            await self._streams.create(subject, bodies.encode(batch), bodies.FILE_KEPT_S)
        except Taken:
            stored = await self._streams.last(subjects.RECORD_STREAM, subject)
            return batch_core.EndStored(
                new=stored == bodies.encode(batch)
            )  # by an earlier try whose answer was lost
        return batch_core.EndStored(new=True)

    # ---- calls of which several run --------------------------------------------------------------

    async def _store_line(self, held: _Held, line: batch_core.StoreLine) -> None:
        new: bool | None = None
        tenant, batch, outcome = held.tenant, held.core.id, "ok" if line.ok else "error"
        subject, any_outcome = (
            subjects.batch_line(tenant, batch, line.number, each) for each in (outcome, "*")
        )
        try:
            await self._streams.create(subject, line.data, STATE_KEPT_S, only=any_outcome)
            new = True
        except Taken:
            new = False
        except HeadraceError as error:
            self._away.warning("answers of a batch wait to be stored: %s", error.message)
        self._handle(held, batch_core.LineStored(line.number, new))

    async def _save(self, held: _Held, batch: Body) -> None:
        with contextlib.suppress(HeadraceError):  # the next one follows
            subject = subjects.batch_part(held.tenant, held.core.id, "state")
            await self._streams.replace(subject, bodies.encode(batch), STATE_KEPT_S)

    async def _look(self, held: _Held) -> None:
        """Look whether the client has cancelled it, or another keeper has ended it."""
        last = self._streams.last
        cancel, end = (subjects.batch_part(held.tenant, held.core.id, part) for part in ("cancel", "end"))
        with contextlib.suppress(HeadraceError):  # the next look follows
            if await last(subjects.RECORD_STREAM, cancel) is not None:
                self._handle(held, batch_core.CancelAsked())
            if await last(subjects.RECORD_STREAM, end) is not None:
                self._handle(held, batch_core.Opened(ended=True))
        held.looks = False

    async def _clean(self, held: _Held, over: batch_core.Over) -> None:
        """Remove what nothing reads any more. It would go by its time, too."""
        with contextlib.suppress(HeadraceError):
            if held.reader is not None:
                await held.reader.aclose()
            for file in over.files:
                await self._store.delete(held.tenant, file)
            lines = subjects.batch_line(held.tenant, held.core.id, "*", "*")
            await self._streams.purge(subjects.FILE_STREAM, lines)


def _hook(held: _Held) -> Hook | None:
    """The event of the end of a batch; None: its client asked for none."""
    batch = held.core.batch
    url = batch.get(WEBHOOK)
    return Hook(url, BATCH, held.tenant, batch["id"], batch["created_at"]) if url else None


def _flaw(check: InputCheck, raw: bytes, endpoint: str, models: set[str], default: str) -> Body | None:
    """What is wrong with the next line."""
    try:
        line = check.read(raw)
    except HeadraceError as error:
        return batch_core.error_entry("invalid_request", error.message, check.line, error.param)
    if line is None:
        return None
    model, number = line.body.get("model", default), check.line
    if line.url != endpoint:
        why = f"line {number}: its url is {line.url}, and the batch is for {endpoint}"
        return batch_core.error_entry("mismatched_url", why, number, "url")
    if not isinstance(model, str) or model not in models:
        there = ", ".join(sorted(models))
        why = f"line {number}: no service serves model {model!r:.80}; there is {there:.200}"
        return batch_core.error_entry("model_not_found", why, number, "body.model")
    return None
