"""`DetokenizerCore` turns the messages of schedulers into frames and answers for clients. Pure.

The actor calls `handle` for each message and `flush` once per turn of the event loop, and runs the returned
commands. A sequence lives from Open to Close, a request until all its choices are closed or one fails. Tokens
only collect text; `flush` makes at most one frame for each stream, so a slow client or broker gets fewer and
longer frames.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from services.detokenizer import response
from services.detokenizer.failover import Backups, Failover
from services.detokenizer.reconnect import Reconnect
from services.detokenizer.text import ScoreReader, TokenGap
from shared import messages
from shared.errors import NO_VECTOR, SCORES_LOST, Cancelled, HeadraceError, Unavailable, from_code
from shared.replies import end_headers
from shared.telemetry.counters import Counted, DetokenizerCounter, in_status
from shared.vocab.vocabulary import Vocabulary

MOST_ASKED = 4  # tries to get a request re-opened, two heartbeats apart; each re-opens all of its scheduler
FORGOTTEN = "messages of its scheduler were lost, and it does not open the request again"


class DetokenizerCore:
    """The open requests of one shard and their text."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.table = self._table = response.OpenRequests(vocabulary)
        self.reconnect = Reconnect()
        self.failover = Failover(self._table, self._fail, self._forget)
        self.backups = Backups()
        self.frames = 0
        self.tokens = 0
        self._torn: set[str] = set()  # schedulers with requests that missed messages at the last heartbeat
        self._now_us = 0  # of the current event
        self._wall_us = 0  # the same by the wall clock, for spans only

    def handle(
        self, scheduler: str, message: messages.Message, trace: str = "", wall_us: int = 0, now_us: int = 0
    ) -> list[response.Command]:
        """Apply one message of the scheduler `kind.id`."""
        self._now_us, self._wall_us = now_us, wall_us
        match message:
            case messages.Tokens():
                return self._on_tokens(scheduler, message)
            case messages.PromptTokens():
                self._on_prompt_scores(scheduler, message)
                return []
            case messages.Open():
                return self._on_open(scheduler, message, trace)
            case messages.Close():
                return self._on_close(scheduler, message)
            case messages.Tokenized() if message.shard:
                self.backups.on_backup(scheduler, message, trace, now_us)
                return []
            case messages.Claims():
                self.backups.on_claims(message, now_us)
                return []
            case messages.Tokenized():
                self.failover.on_tokenized(scheduler, message)
                return []
            case messages.Accepted() | messages.Rejected():
                return self.failover.on_answer(scheduler, message)
        return [response.Fault(f"{type(message).__name__} of {scheduler} is not for a detokenizer")]

    def flush(self, wall_us: int = 0, now_us: int = 0) -> list[response.Command]:
        """One frame for each reader with waiting text."""
        waiting, self._table.waiting = self._table.waiting, {}
        held = self.reconnect.is_held
        commands = list[response.Command]()
        for request in waiting.values():
            if not request.prompt.is_whole:
                continue  # another scheduler computes the prompt again; then the text waits once more
            request.note_begun(now_us, wall_us)
            if not request.opened.stream:
                commands += self._copies(request)
            elif not held(request.number) and (delta := request.delta()):  # a reconnect may have sent it
                commands.append(self._publish(request, delta))
        return commands

    def on_client_gone(self, number: int) -> list[response.Command]:
        """The client of request `number` has gone. Its text is still built: the scheduler decides whether the
        request continues."""
        if number in self._table.readers:
            self._table.set_reader(self._table.readers[number], None)
            return []
        key = self._table.key_of(number)
        request = None if key is None else self._table.requests[key]
        if self.reconnect.on_absent(number, request) or key is None or request is None:
            return []
        if request.kept is None or not request.kept.finish_detached:
            request.unwanted = request.unwanted or Cancelled("the client has gone")
        elif not request.seqs:
            return []  # a new scheduler will finish it
        return [response.detached(key, request)]

    def on_broker_lost(self) -> None:
        """The connection is cut: what was sent to the readers of plain requests may be lost, too."""
        self.reconnect.on_broker_lost()
        for request in [*self._table.readers.values()]:
            self._table.set_reader(request, None)

    @property
    def streams(self) -> list[response.ResponseText]:
        """The open requests that stream."""
        return [r for r in self._table.requests.values() if r.opened.stream]

    @property
    def plain(self) -> list[response.ResponseText]:
        """The open requests that get one reply."""
        return [r for r in self._table.requests.values() if not r.opened.stream]

    def advance_reconnect(self) -> list[response.Command]:
        """Every reconnect.CONNECT_POLL_S while the reconnect is active."""
        frames, gone = self.reconnect.advance()
        self.frames += len(frames)
        return [*frames, *(command for number in gone for command in self.on_client_gone(number))]

    def on_stream_lost(self, scheduler: str) -> list[response.Command]:
        """Messages of the scheduler are lost. It has every token, and re-opens all its requests after the
        returned message. Until then its requests here are torn: they take no tokens."""
        for key in self._table.of_scheduler(scheduler):
            self._table.requests[key].torn = 1
        return [_missed(scheduler)]

    def upkeep(
        self, now_us: int = 0, lives: Callable[[str], bool] = lambda source: True
    ) -> list[response.Command]:
        """Once a heartbeat: repeat the request to re-open torn requests after two heartbeats; after
        MOST_ASKED tries their scheduler has lost them, and one that takes them over is found."""
        self._now_us = now_us
        self.backups.expire(now_us, lives)
        torn = {key[0] for key, request in self._table.requests.items() if request.torn and lives(key[0])}
        late = torn & self._torn
        self._torn = torn - late
        asked, forgotten = set[str](), list[response.RequestKey]()
        for key, request in self._table.requests.items():
            if request.torn and key[0] in late:
                if request.torn < MOST_ASKED:
                    asked.add(key[0])
                    request.torn += 1
                else:
                    forgotten.append(key)
        commands = self.failover.on_requests_lost(forgotten, FORGOTTEN, void=True)
        return [*(_missed(scheduler) for scheduler in sorted(asked)), *commands]

    def on_lost(
        self, source: str, why: str, lives: Callable[[str], bool], *, void: bool = False
    ) -> list[response.Command]:
        """A scheduler or another detokenizer is silent, or has lost its state (`void`)."""
        commands = self.failover.on_lost(source, why, void=void)
        for copy in self.backups.on_gone(source, lives, self._now_us, void=void):
            if self._table.named(copy.tokenized.tenant, copy.tokenized.request):
                continue
            again = replace(copy.tokenized, attempt=copy.tokenized.attempt + 1)
            request = self._table.adopt(copy.scheduler, again, copy.trace)
            request.note_opened(copy.since_us, self._wall_us)
            if copy.cancelled:
                request.unwanted = Cancelled("cancelled by the client")
            elif copy.tokenized.stream:
                commands.append(self._publish(request, request.accepted()))
            commands += self.failover.on_lost(copy.scheduler, f"{why}, as its other service has", void=True)
        return commands

    def resume(
        self, tokenized: messages.Tokenized, scores: messages.Tokens | None, wall_us: int, now_us: int
    ) -> list[response.Command]:
        """Have a request go on after its savepoint, unless it is open here. As attempt 1 it is never newer
        than one that runs, maybe from the start: its scheduler refuses, and no two texts are mixed."""
        name = (tokenized.tenant, tokenized.request)
        if self._table.named(*name) or self.failover.has_lost(*name):
            return []
        at = len(tokenized.tokens) - sum(tokenized.generated)
        asked = replace(
            tokenized, attempt=1, tokens=tokenized.tokens[:at], generated=messages.ints(), reasons=()
        )
        request = self._table.adopt("", replace(asked, parent_span=""), "")
        request.note_opened(now_us, wall_us)
        reader = None if scores is None else ScoreReader(scores)
        for choice, count in enumerate(tokenized.generated):
            row = () if reader is None else reader.next_row(count)
            request.choices[choice].add_tokens(0, tokenized.tokens[at : at + count], row)
            at += count
        return self.failover.on_lost("", "its services have gone", void=True)

    def counted(self) -> Counted:
        """The counts of this shard; `sequences` and `requests` are 0 when idle."""
        return {
            DetokenizerCounter.SEQUENCES: len(self._table.sequences),
            DetokenizerCounter.REQUESTS: len(self._table.requests),
            DetokenizerCounter.FAILOVER: len(self.failover),
            DetokenizerCounter.BACKUPS: len(self.backups),
            DetokenizerCounter.UNCONFIRMED: len(self.reconnect),
            DetokenizerCounter.FRAMES: self.frames,
            DetokenizerCounter.TOKENS: self.tokens,
        }

    def status(self) -> dict[str, int]:
        """The counts as `headrace status` has them."""
        return in_status(self.counted())

    @property
    def is_idle(self) -> bool:
        """True if no request is open and no client is unsure."""
        return not self._table.requests and not self.reconnect.has_waiting

    # ---- messages -------------------------------------------------------------------------------

    def _on_open(self, scheduler: str, opened: messages.Open, trace: str) -> list[response.Command]:
        self.backups.on_opened(opened)
        commands, read = self.failover.on_opened(scheduler, opened)
        request, fresh = self._table.add(scheduler, opened, trace) if read else (None, False)
        if request is None:
            return commands
        request.note_opened(self._now_us, self._wall_us)
        if fresh and opened.stream:
            commands.append(self._publish(request, request.accepted()))
        if opened.tokens:  # a re-open: all tokens so far
            tokens = messages.Tokens(
                executor="",
                step=0,
                seqs=messages.ints([opened.seq]),
                first=messages.ints([0]),
                counts=messages.ints([len(opened.tokens)]),
                ids=opened.tokens,
            )
            commands += self._on_tokens(scheduler, tokens)
        return commands

    def _on_tokens(self, scheduler: str, step: messages.Tokens) -> list[response.Command]:
        commands: list[response.Command] = []
        sequences, ids, at = self._table.sequences, step.ids, 0
        self.tokens += len(ids)
        scores = ScoreReader(step) if step.logprobs else None
        for seq, first, count in zip(step.seqs, step.first, step.counts, strict=True):
            start, at = at, at + count
            row = scores.next_row(count) if scores is not None else ()
            found = sequences.get((scheduler, seq))
            if found is None:
                continue  # failed or closed already
            stream, request = found
            if request.torn:
                continue
            try:
                if stream.add_tokens(first, ids[start:at], row):
                    commands.append(
                        response.SendTo(scheduler, messages.StopFound(seq=seq, index=stream.taken))
                    )
            except TokenGap as gap:
                commands += self._on_gap(scheduler, request, gap)
                continue
            if not request.opened.stream:
                request.note_begun(self._now_us, self._wall_us)
            if stream.has_text and (request.opened.stream or request.reader is not None):
                self._table.waiting[request.number] = request
        return commands

    def _on_prompt_scores(self, scheduler: str, piece: messages.PromptTokens) -> None:
        _, request = self._table.sequences.get((scheduler, piece.seq), (None, None))
        if request is not None and not request.torn:
            request.prompt.add(piece)
            if request.prompt.is_whole and any(stream.has_text for stream in request.choices.values()):
                self._table.waiting[request.number] = request

    def _on_close(self, scheduler: str, close: messages.Close) -> list[response.Command]:
        found = self._table.sequences.get((scheduler, close.seq))
        if close.reason == "moved":  # another shard has the whole request and answers its client
            if found is not None:
                self._forget(_key(scheduler, found[1]))
            return []
        if found is None:  # failed already, or a duplicate: the scheduler still waits for Ended
            return [_ended(scheduler, close, close.final, close.reason)]
        stream, request = found
        if request.torn:
            return []  # the scheduler repeats it after the Opens
        if request.is_embedding and not close.vector and close.reason != "error":
            close = replace(close, reason="error", code=Unavailable.code, message=NO_VECTOR)
        if not request.prompt.is_whole and close.reason != "error":
            close = replace(close, reason="error", code=Unavailable.code, message=SCORES_LOST)
        if close.reason == "error":
            error = from_code(close.code, close.message, close.retry_after_ms)
            request.on_failed(stream, close)
            return [
                *self._fail(_key(scheduler, request), error),
                _ended(scheduler, close, close.final, "error"),
            ]
        try:
            tokens = request.close(stream, close)
        except TokenGap as gap:
            return [*self._on_gap(scheduler, request, gap), _ended(scheduler, close, close.final, "error")]
        del self._table.sequences[scheduler, close.seq]
        if stream.has_text and (request.opened.stream or request.reader is not None):
            self._table.waiting[request.number] = request
        commands: list[response.Command] = []
        if request.is_complete:
            key = _key(scheduler, request)
            commands = self._last(key, request.end, end_headers(trace=request.trace))
        has_calls = request.opened.most_calls and stream.reason == "stop"  # an answer that was cut calls none
        calls = stream.calls(tokens) if has_calls else ()
        return [*commands, _ended(scheduler, close, tokens, stream.reason, calls)]

    # ---- ends of requests -----------------------------------------------------------------------

    def _on_gap(
        self, scheduler: str, request: response.ResponseText, gap: TokenGap
    ) -> list[response.Command]:
        fault = response.Fault(f"request {request.opened.request} of {scheduler}: {gap.message}")
        key = _key(scheduler, request)
        return [fault, response.detached(key, request), *self._fail(key, gap)]

    def _forget(self, key: response.RequestKey) -> None:
        """Drop a request that another detokenizer answers."""
        self.reconnect.forget(self._table.forget(key).number)

    def _fail(self, key: response.RequestKey, error: HeadraceError) -> list[response.Command]:
        request = self._table.requests[key]
        return self._last(key, lambda: request.failure(error), end_headers(error, request.trace))

    def _last(
        self, key: response.RequestKey, build: Callable[[], bytes], headers: dict[str, str]
    ) -> list[response.Command]:
        """Send the waiting text and the last message; an unsure client gets both when it is back."""
        request = self._table.requests[key]
        waits = self._table.waiting.pop(request.number, None) is not None
        copies = self._copies(request)  # before `build` drains the text
        rest = request.delta() if waits and request.opened.stream else b""
        last = build()
        if (reader := request.reader) is not None:
            copies.append(self._copy(reader, request.last_frame(reader.frames), headers))
        self._table.forget(key)
        self.backups.on_answered(request.opened, self._now_us)
        held = self.reconnect.is_held(request.number)
        self.reconnect.on_ended(request)
        if held:
            return [*copies, response.Finished(request)]
        if rest:
            request.note_begun(self._now_us, self._wall_us)
        commands = [self._publish(request, rest)] if rest else []
        return [*copies, *commands, self._publish(request, last, headers), response.Finished(request)]

    def _publish(
        self, request: response.ResponseText, data: bytes, headers: dict[str, str] | None = None
    ) -> response.Command:
        self.frames += 1
        return response.Publish(request.inbox, data, request.number, headers or {})

    def _copies(self, request: response.ResponseText) -> list[response.Command]:
        """The text that is new to the attached reader of a plain request."""
        reader = request.reader
        delta = reader.delta(request.choices) if reader is not None else b""
        return [self._copy(reader, delta)] if reader is not None and delta else []

    def _copy(
        self, reader: response.Reader, data: bytes, headers: dict[str, str] | None = None
    ) -> response.Command:
        self.frames += 1
        return response.Publish(reader.inbox, data, reader.number, headers or {})


def _key(scheduler: str, request: response.ResponseText) -> response.RequestKey:
    return (scheduler, request.opened.tenant, request.opened.request)


def _missed(scheduler: str) -> response.SendTo:
    return response.SendTo(scheduler, messages.Detached(seqs=messages.ints()))


def _ended(
    scheduler: str, close: messages.Close, index: int, reason: str, calls: tuple[str, ...] = ()
) -> response.SendTo:
    return response.SendTo(scheduler, messages.Ended(seq=close.seq, index=index, reason=reason, calls=calls))
