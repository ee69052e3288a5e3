"""`BatchCore` takes one batch from its delivery to its last record. Pure.

    delivered ─▶ open ─▶ check the file ─▶ feed lines ─▶ write the files ─▶ record of the end ─▶ ack
                   │ record of the end: ack    │ cancelled, expired: cancel what runs, then write

A batch is one message of the work queue; each line that ends is a create-only record. A keeper may die
anywhere: the delivery comes again, and the next one feeds the lines without a record. Invariants: a line has
one record; the delivery is acked only if there is a record of the end.

Its time is over after a duration, which is noted with its state. `expires_at` is only shown, since a wall
clock may be set. A time in which no keeper holds the batch does not count.

The window of lines in flight starts small, doubles while lines are answered, is halved when the fleet refuses
one for lack of room, and then grows by one line in the time of an answer, as congestion windows do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from hashlib import sha256
from heapq import heappop, heappush

from services.keeper import core
from services.keeper.records import Body
from shared import bodies
from shared.api import MAX_TIMEOUT_S
from shared.errors import (
    EngineError,
    HeadraceError,
    Overloaded,
    PayloadTooLarge,
    Unavailable,
    UnknownRequest,
)
from shared.nats.object_store import DamagedFile
from shared.openai import batch_lines
from shared.openai.call import Call

FIRST_WINDOW = 8  # lines in flight at first
MOST_IN_FLIGHT = 512  # of all batches of a keeper: half of what may wait at a scheduler by default
FLIGHT_BYTES = 33_554_432  # of a batch's lines in flight and their answers
READ_AHEAD, READ_BYTES = 1_024, 8_388_608  # lines and bytes that wait to be sent
LOOK_AHEAD = 1_024  # lines of the file that are sent in the order of their prompts
PREFIX_BYTES = 4_096  # of a prompt that are compared: some thousand tokens
SAVE_US = 1_000_000  # between two notes of a batch's state
NOTE_AGE_US = 60_000_000  # and, if nothing else has changed, of its age
CLOSE_US = 5_000_000  # for the lines in flight of a cancelled or expired batch to end
GIVEN_UP_S = 3_600  # after its time, a batch whose files find no room has failed
VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING = "validating", "in_progress", "finalizing", "cancelling"
WEBHOOK = "_webhook"  # the private field of a batch with the URL for the event of its end
STATE_KEPT_S = 777_600  # nine days: longer than the longest batch
AGE = "_age_s"  # the private field with the seconds for which keepers have held it
_PROMPT = re.compile(rb'"(?:instructions|messages|prompt|input)"\s*:')  # within a text its quotes are escaped


@dataclass(frozen=True, slots=True)
class Opened:
    """What the store has of a batch: whether it has ended, its state, the lines with a record."""

    ended: bool
    state: Body | None = None
    ok: Collection[int] = ()
    failed: Collection[int] = ()


@dataclass(frozen=True, slots=True)
class Checked:
    """The file was read once: its requests, the model of lines without one, what is wrong with it."""

    total: int
    model: str = ""
    errors: tuple[Body, ...] = ()


@dataclass(frozen=True, slots=True)
class LinesRead:
    """Further lines without a record, with their numbers; `end`: there are no more."""

    lines: tuple[tuple[int, bytes], ...]
    end: bool


@dataclass(frozen=True, slots=True)
class LineAnswered:
    """A service answered a request of a line."""

    request: str
    outcome: Body | HeadraceError
    size: int = 0


@dataclass(frozen=True, slots=True)
class LineStored:
    """The record of a line was stored now (True), was there before (False), or could not be stored (None)."""

    number: int
    new: bool | None


@dataclass(frozen=True, slots=True)
class Written:
    """The files of a batch are stored; counts as its records have them."""

    output: str | None
    error: str | None
    completed: int
    failed: int


@dataclass(frozen=True, slots=True)
class EndStored:
    """The record of the end was stored now (True) or was there before (False)."""

    new: bool


@dataclass(frozen=True, slots=True)
class CallFailed:
    """The command that was run last had no result."""

    error: HeadraceError


@dataclass(frozen=True, slots=True)
class CancelAsked:
    """The client cancels the batch."""


@dataclass(frozen=True, slots=True)
class BatchTick:
    """Time has passed."""


BatchEvent = (
    Opened | Checked | LinesRead | LineAnswered | LineStored | Written | EndStored | CallFailed | CancelAsked
    | BatchTick
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class OpenBatch:
    """Look what the store has; Opened or CallFailed follows."""


@dataclass(frozen=True, slots=True)
class CheckFile:
    """Read the whole file; Checked or CallFailed follows."""


@dataclass(frozen=True, slots=True)
class ReadLines:
    """Read up to `most` further lines; LinesRead or CallFailed follows."""

    most: int


@dataclass(frozen=True, slots=True)
class WriteFiles:
    """Write the files from the records; `unfinished`: also an error for each line without one. Written or
    CallFailed follows."""

    unfinished: bool


@dataclass(frozen=True, slots=True)
class StoreEnd:
    """Store the record of the end, unless there is one; EndStored or CallFailed follows."""

    batch: Body


@dataclass(frozen=True, slots=True)
class AskLine:
    """Send a request of a line to a tokenizer; LineAnswered may follow."""

    body: Body


@dataclass(frozen=True, slots=True)
class CancelLine:
    """Cancel a request."""

    request: str


@dataclass(frozen=True, slots=True)
class StoreLine:
    """Store the record of a line, unless there is one; LineStored follows."""

    number: int
    ok: bool
    data: bytes


@dataclass(frozen=True, slots=True)
class SaveState:
    """Note the state for its readers and for the next keeper."""

    batch: Body


@dataclass(frozen=True, slots=True)
class Over:
    """The batch has ended as `status`. `files`: written for nothing, another keeper has ended it before.
    Its lines' records may go."""

    status: str = ""  # empty: it had ended before
    files: tuple[str, ...] = ()


Call_ = OpenBatch | CheckFile | ReadLines | WriteFiles | StoreEnd  # one at a time, each has one result
BatchCommand = (
    Call_ | AskLine | CancelLine | StoreLine | SaveState | Over | core.Ack | core.Nak | core.Progress
)  # fmt: skip


@dataclass(slots=True)
class _Flight:
    """A line in flight."""

    number: int
    custom_id: str
    call: Call
    size: int
    natives: list[Body | None]
    asked: bool = False
    asked_us: int = 0
    due_us: int = 0  # of the next try
    tries: int = 0
    record: StoreLine | None = None

    def request_ids(self) -> list[str]:
        """The ids of its requests, one for each prompt."""
        return [str(body["request_id"]) for body in self.call.bodies]

    def unanswered(self) -> Iterator[Body]:
        """The requests without an answer."""
        return (b for b, native in zip(self.call.bodies, self.natives, strict=True) if native is None)


@dataclass(slots=True)
class Window:
    """How many lines may be in flight."""

    size: float = FIRST_WINDOW
    doubling: bool = True
    cut_us: int = -1  # time of the last cut

    def grow(self) -> None:
        """A line was answered."""
        self.size = min(self.size + (1 if self.doubling else 1 / self.size), MOST_IN_FLIGHT)

    def cut(self, asked_us: int, now_us: int) -> None:
        """A line asked for at `asked_us` found no room. Those asked for before the last cut are not counted
        again."""
        if asked_us > self.cut_us:
            self.size, self.doubling, self.cut_us = max(1.0, self.size / 2), False, now_us

    def restart(self) -> None:
        """No service was there: what it will take is unknown."""
        self.size, self.doubling = FIRST_WINDOW, True


@dataclass(slots=True)
class BatchCore:
    """One batch that this keeper holds. `batch` is OpenAI's object, with private fields named `_…`.

    LOOK_AHEAD lines of the file at a time are sent in the order of their prompts: lines with one beginning
    follow each other, and find its blocks in the prefix cache. The records show which lines are missing, so
    any order is right.
    """

    batch: Body
    ack: str
    max_payload: int
    share: int = MOST_IN_FLIGHT  # of this batch in what all may have in flight
    resolve: Callable[[str, str], str] = lambda name, request: name  # the model of an alias, for a line
    over: bool = False
    ok: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    window: Window = field(default_factory=Window)
    refused: int = 0
    _flights: dict[int, _Flight] = field(default_factory=dict)  # by line
    _requests: dict[str, int] = field(default_factory=dict)  # line by id of a request
    _queue: list[tuple[int, bytes, int, bytes]] = field(default_factory=list)  # a heap: see departure
    _queued_bytes: int = 0
    _flight_bytes: int = 0
    _read_all: bool = False
    _call: Call_ | None = None  # that runs, or is to be run again at `_again_us`
    _again_us: int = 0  # 0: it runs
    _closing: str = ""  # the status with which it will end
    _close_us: int = 0
    _progress_us: int = 0
    _save_us: int = 0
    _changed: bool = False
    _now_us: int = 0
    _since_us: int = 0  # it was created, as far as keepers have held it
    _wall_s: int = 0  # shown, and never compared

    @property
    def id(self) -> str:
        """The batch's id."""
        return str(self.batch["id"])

    @property
    def in_flight(self) -> int:
        """Lines that were sent and have no record."""
        return len(self._flights)

    def begin(self, now_us: int, age_us: int = 0) -> list[BatchCommand]:
        """The first commands. `age_us`: how long it has waited in the queue."""
        self._now_us, self._progress_us = now_us, now_us + core.PROGRESS_US
        self._since_us = now_us - age_us
        return [self._run(OpenBatch())]

    def handle(self, event: BatchEvent, now_us: int, now_wall_us: int) -> list[BatchCommand]:
        """Apply one event."""
        self._now_us, self._wall_s = now_us, now_wall_us // 1_000_000
        if self.over:
            return []
        match event:
            case LineAnswered():
                return [*self._on_line_answered(event), *self._go_on()]
            case LineStored():
                return [*self._on_line_stored(event), *self._go_on()]
            case CancelAsked():
                return [*self._close(batch_lines.CANCELLED), *self._go_on()]
            case BatchTick():
                return [*self._on_tick(), *self._go_on()]
            case CallFailed():
                return [*self._on_call_failed(event.error)]
        if isinstance(event, Opened) and isinstance(self._call, StoreEnd):
            return []  # a look while its own end is being stored
        self._call = None
        match event:
            case Opened():
                return [*self._on_opened(event), *self._go_on()]
            case Checked():
                return [*self._on_checked(event), *self._go_on()]
            case LinesRead():
                if not self._closing:
                    for line in event.lines:
                        heappush(self._queue, departure(*line))
                    self._queued_bytes += sum(len(raw) for _, raw in event.lines)
                self._read_all = event.end
                return [*self._go_on()]
            case Written():
                return [*self._on_written(event)]
            case EndStored():
                return [*self._on_end_stored(event)]

    def on_reconnected(self, now_us: int) -> None:
        """The nats-server was away: an answer may be lost."""
        for flight in self._flights.values():
            flight.due_us = min(flight.due_us, now_us + core.RETRY_US)

    def give_back(self) -> list[BatchCommand]:
        """Have the batch delivered again, now: this keeper stops."""
        self.over = True
        return [core.Nak(self.ack, 0)]

    # ---- from one step to the next ---------------------------------------------------------------

    def _run(self, call: Call_) -> Call_:
        self._call, self._again_us = call, 0
        return call

    def _on_opened(self, event: Opened) -> Iterator[BatchCommand]:
        if event.ended:
            yield from self._finish(Over())
            return
        self.batch = dict(event.state or self.batch)
        self._since_us = min(self._since_us, self._now_us - self.batch.get(AGE, 0) * 1_000_000)
        self.ok, self.failed = set(event.ok), set(event.failed)
        if self.batch["status"] == CANCELLING:
            yield from self._close(batch_lines.CANCELLED)
        elif self.batch["status"] == VALIDATING and not self._closing:
            yield self._run(CheckFile())

    def _on_checked(self, event: Checked) -> Iterator[BatchCommand]:
        self.batch["request_counts"] = {"total": event.total, "completed": 0, "failed": 0}
        self.batch["_model"] = event.model
        if event.errors:
            yield from self._fail(*event.errors)
            return
        if not self._closing:
            self.batch |= {"status": IN_PROGRESS, "in_progress_at": self._wall_s}
        yield self._save()

    def _go_on(self) -> Iterator[BatchCommand]:
        """What can be done now."""
        if self.over or (self.batch["status"] == VALIDATING and not self._closing):
            return
        if self._closing:
            if not self._flights and self._call is None:
                yield from self._write()
            return
        yield from self._feed()
        if self._call is None and not self._read_all:
            room = READ_AHEAD - len(self._queue)
            if room > 0 and self._queued_bytes < READ_BYTES:
                yield self._run(ReadLines(room))
        if self._read_all and not self._queue and not self._flights and self._call is None:
            yield from self._close(batch_lines.COMPLETED)
            yield from self._write()

    def _close(self, status: str) -> Iterator[BatchCommand]:
        """Feed no more lines: the batch will end with this status."""
        if self._closing:
            return
        self._closing, self._close_us = status, self._now_us + CLOSE_US
        self._queue.clear()
        if status == batch_lines.COMPLETED:
            return
        if status == batch_lines.CANCELLED:
            self.batch |= {"status": CANCELLING, "cancelling_at": self._wall_s}
            yield self._save()
        for flight in [*self._flights.values()]:
            if flight.record is None:
                for request in flight.request_ids() if flight.asked else ():
                    yield CancelLine(request)
                if not flight.asked:
                    self._forget(flight)
        if isinstance(self._call, CheckFile | ReadLines) and self._again_us:
            self._call = None  # it is not needed any more

    def _write(self) -> Iterator[BatchCommand]:
        if self._closing != batch_lines.CANCELLED:
            self.batch |= {"status": FINALIZING, "finalizing_at": self._wall_s}
            yield self._save()
        yield self._run(WriteFiles(unfinished=self._closing == batch_lines.EXPIRED))

    def _on_written(self, event: Written) -> Iterator[BatchCommand]:
        self.batch |= {"output_file_id": event.output, "error_file_id": event.error}
        total = self.batch["request_counts"]["total"]
        self.batch["request_counts"] = {"total": total, "completed": event.completed, "failed": event.failed}
        yield self._end(self._closing)

    def _end(self, status: str) -> BatchCommand:
        self.batch |= {"status": status, f"{status}_at": self._wall_s}
        return self._run(StoreEnd(self.batch))

    def _on_end_stored(self, event: EndStored) -> Iterator[BatchCommand]:
        files = (self.batch.get("output_file_id"), self.batch.get("error_file_id"))
        lost = () if event.new else tuple(file for file in files if file is not None)
        yield from self._finish(Over(str(self.batch["status"]) if event.new else "", lost))

    def _finish(self, over: Over) -> Iterator[BatchCommand]:
        self.over = True
        yield over
        yield core.Ack(self.ack)

    def _fail(self, *errors: Body) -> Iterator[BatchCommand]:
        """It has failed before its first line."""
        self.batch["errors"] = {"object": "list", "data": [*errors]}
        self._closing = batch_lines.FAILED
        yield self._end(batch_lines.FAILED)

    def _on_call_failed(self, error: HeadraceError) -> Iterator[BatchCommand]:
        """Try again, unless the file is gone or damaged."""
        self._again_us = self._now_us + core.RETRY_US
        if not isinstance(error, UnknownRequest | DamagedFile):
            return
        wrong = error_entry("invalid_file", error.message)
        if isinstance(self._call, CheckFile):
            self._call = None
            yield from self._fail(wrong)
        elif isinstance(self._call, ReadLines):
            self._call = None
            self.batch["errors"] = {"object": "list", "data": [wrong]}
            yield from self._close(batch_lines.FAILED)
            yield from self._go_on()

    # ---- lines -----------------------------------------------------------------------------------

    def _feed(self) -> Iterator[BatchCommand]:
        most = min(int(self.window.size), self.share)
        while self._queue and len(self._flights) < most and self._flight_bytes < FLIGHT_BYTES:
            *_, number, raw = heappop(self._queue)
            self._queued_bytes -= len(raw)
            yield from self._depart(number, raw)

    def _depart(self, number: int, raw: bytes) -> Iterator[BatchCommand]:
        request = f"{self.id}.{number}"
        try:
            line, call = self._called(request, raw)
        except HeadraceError as error:  # it was right when the file was checked, by another version
            wrong = error_entry("invalid_request", error.message, number, error.param)
            self.batch["errors"] = {"object": "list", "data": [wrong]}
            yield from self._close(batch_lines.FAILED)
            return
        flight = _Flight(number, line.custom_id, call, len(raw), [None] * len(call.bodies))
        self._flights[number] = flight
        self._flight_bytes += flight.size
        self._requests |= dict.fromkeys(flight.request_ids(), number)
        yield from self._ask(flight)

    def _called(self, request: str, raw: bytes) -> tuple[batch_lines.BatchLine, Call]:
        """A line and its requests. Raises BadRequest."""
        line = batch_lines.read_line(raw)
        body = {name: value for name, value in line.body.items() if name != "request_id"}
        drawn = int.from_bytes(sha256(request.encode()).digest()[:4]) >> 1  # sent again, it has the same seed
        defaults = {
            "model": self.batch["_model"],
            "slo_class": "batch",
            "seed": drawn,
            "timeout_s": MAX_TIMEOUT_S,
            "finish_detached": True,  # the next keeper may be there in time for the answer
        }
        call = replace(line, body=body).call(request, defaults)
        return line, call.of_model(self.resolve(call.model, request))

    def _ask(self, flight: _Flight) -> Iterator[BatchCommand]:
        flight.asked, flight.asked_us, flight.due_us = True, self._now_us, self._now_us + core.ASK_AGAIN_US
        yield from (AskLine(body) for body in flight.unanswered())

    def _on_line_answered(self, event: LineAnswered) -> Iterator[BatchCommand]:
        flight = self._flights.get(self._requests.get(event.request, 0))
        if flight is None or flight.record is not None:
            return
        outcome = event.outcome
        if isinstance(outcome, HeadraceError):
            if isinstance(outcome, core.TRY_AGAIN) and not self._closing:
                self._on_refused(flight, outcome)
            elif self._closing:  # cancelled, or it had no place: it has no record
                self._forget(flight)
            else:
                yield self._record(
                    flight, batch_lines.refused(outcome, event.request, flight.custom_id), ok=False
                )
            return
        flight.size += event.size
        self._flight_bytes += event.size
        flight.natives[flight.request_ids().index(event.request)] = outcome
        natives = [native for native in flight.natives if native is not None]
        if len(natives) < len(flight.natives):
            return
        self.window.grow()
        try:
            body = batch_lines.answered(flight.call, natives, flight.custom_id)
        except (LookupError, TypeError) as error:
            why = EngineError(f"a service answered in another form: {error!r:.120}")
            yield self._record(flight, batch_lines.refused(why, event.request, flight.custom_id), ok=False)
        else:
            yield self._record(flight, body, ok=True)

    def _on_refused(self, flight: _Flight, error: HeadraceError) -> None:
        """A line found no room, or no service: it is sent again."""
        self.refused += 1
        if isinstance(error, Overloaded):
            self.window.cut(flight.asked_us, self._now_us)
        elif isinstance(error, Unavailable):
            self.window.restart()
        delay_us = min(core.FIRST_DELAY_US << min(flight.tries, 8), core.LAST_DELAY_US)
        flight.asked, flight.tries = False, flight.tries + 1
        flight.due_us = self._now_us + max(delay_us, error.retry_after_ms * 1_000)

    def _record(self, flight: _Flight, body: Body, *, ok: bool) -> BatchCommand:
        data = bodies.encode({"id": f"batch_req_{self.id}.{flight.number}", **body})
        if len(data) + 1_024 > self.max_payload:  # headers take some of it
            why = PayloadTooLarge(f"the answer of {len(data)} bytes is over the server's limit: ask for less")
            line = batch_lines.refused(why, flight.call.request_id, flight.custom_id)
            data, ok = bodies.encode({"id": f"batch_req_{self.id}.{flight.number}", **line}), False
        flight.record, flight.due_us = StoreLine(flight.number, ok, data), self._now_us + core.RETRY_US
        return flight.record

    def _on_line_stored(self, event: LineStored) -> Iterator[BatchCommand]:
        flight = self._flights.get(event.number)
        if flight is None or flight.record is None or event.new is None:
            return  # `due_us` brings the next try
        (self.ok if flight.record.ok else self.failed).add(flight.number)
        self._changed = True
        self._forget(flight)
        yield from ()

    def _forget(self, flight: _Flight) -> None:
        del self._flights[flight.number]
        self._flight_bytes -= flight.size
        for request in flight.request_ids():
            del self._requests[request]

    # ---- time ------------------------------------------------------------------------------------

    def _on_tick(self) -> Iterator[BatchCommand]:
        if self._now_us >= self._progress_us:
            self._progress_us = self._now_us + core.PROGRESS_US
            yield core.Progress(self.ack)
        if self._late_s >= 0:
            yield from self._late()
        if self._call is not None and 0 < self._again_us <= self._now_us:
            yield self._run(self._call)
        if self._closing and self._flights and self._now_us >= self._close_us:
            for flight in [*self._flights.values()]:
                self._forget(flight)
        asked = sum(flight.asked for flight in self._flights.values())
        for flight in self._flights.values():
            if self._now_us < flight.due_us:
                continue
            if flight.record is not None:
                flight.due_us = self._now_us + core.RETRY_US
                yield flight.record
            elif flight.asked or asked < self.window.size:
                asked += not flight.asked
                yield from self._ask(flight)
        note_us = self._save_us + NOTE_AGE_US if self.batch["status"] == IN_PROGRESS else self._now_us + 1
        if self._now_us >= (self._save_us if self._changed else note_us):
            yield self._save()

    @property
    def _age_s(self) -> int:
        return (self._now_us - self._since_us) // 1_000_000

    @property
    def _late_s(self) -> int:
        """Seconds since its time is over; below 0: until then."""
        return int(self._age_s - (self.batch["expires_at"] - self.batch["created_at"]))

    def _late(self) -> Iterator[BatchCommand]:
        yield from self._close(batch_lines.EXPIRED)
        if self._late_s >= GIVEN_UP_S and self._again_us and isinstance(self._call, WriteFiles):
            yield from self._fail(error_entry("store_full", "its files found no room: delete some files"))

    def _save(self) -> SaveState:
        counts = self.batch["request_counts"]
        self.batch["request_counts"] = {**counts, "completed": len(self.ok), "failed": len(self.failed)}
        self.batch[AGE] = self._age_s
        self._changed, self._save_us = False, self._now_us + SAVE_US
        return SaveState(dict(self.batch))


def departure(number: int, raw: bytes) -> tuple[int, bytes, int, bytes]:
    """A line with its place in the order of departure before it: its part of the file, then its prompt."""
    found = _PROMPT.search(raw)
    at = found.start() if found else 0
    return number // LOOK_AHEAD, raw[at : at + PREFIX_BYTES], number, raw


def error_entry(code: str, message: str, line: int | None = None, param: str | None = None) -> Body:
    """An entry of a batch's `errors`."""
    return {"code": code, "message": message, "param": param, "line": line}
