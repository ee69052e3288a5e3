"""`OpenRequests` holds the open requests of one shard; the commands are the core's output for the actor.

A request has a key and a number; a sequence has a scheduler and a number there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.detokenizer.response import Reader, ResponseText
from services.detokenizer.text import SequenceStream
from shared.messages import MOVED, Cancel, Detached, Ended, Open, StopFound, Tokenized
from shared.vocab.vocabulary import Vocabulary

RequestKey = tuple[str, str, str]  # scheduler, tenant, request


class OpenRequests:
    """The open requests of one shard. Only this class adds and removes them."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.sequences: dict[tuple[str, int], tuple[SequenceStream, ResponseText]] = {}
        self.requests: dict[RequestKey, ResponseText] = {}
        self.waiting: dict[int, ResponseText] = {}  # those with text to send, by number
        self.readers: dict[int, ResponseText] = {}  # plain requests, by the number of their attached reader
        self.checkpointed: dict[int, ResponseText] = {}  # those whose tokens are kept, by number
        self._vocabulary = vocabulary
        self._numbers: dict[int, RequestKey] = {}
        self._named: dict[tuple[str, str], list[RequestKey]] = {}
        self._last_number = 0

    def add(self, scheduler: str, opened: Open, trace: str) -> tuple[ResponseText | None, bool]:
        """Add a sequence. Returns its request (None for a duplicate or outdated Open) and whether the request
        is new. A higher attempt replaces a lower one."""
        key = (scheduler, opened.tenant, opened.request)
        request = self.requests.get(key)
        if request is not None and opened.attempt > request.opened.attempt:
            self.forget(key)
            request = None
        fresh = request is None
        if request is None:
            request = self.requests[key] = ResponseText(opened, self.next_number(), trace)
            self._list(key, request)
        elif opened.attempt < request.opened.attempt:
            return None, False
        elif (known := request.choices.get(opened.choice)) is not None:
            if known.seq >= 0:
                return None, False
            known.seq = opened.seq  # at the scheduler that resumes it
            if opened.choice not in request.closed:
                self.sequences[scheduler, opened.seq] = (known, request)
            return request, False
        self.sequences[scheduler, opened.seq] = (request.add(opened, self._vocabulary), request)
        return request, fresh

    def adopt(self, scheduler: str, tokenized: Tokenized, trace: str) -> ResponseText:
        """Add a request from its backup or checkpoint, without tokens, as a lost request of its scheduler."""
        choices = [opened_of(tokenized, choice) for choice in range(tokenized.n)]
        key = (scheduler, tokenized.tenant, tokenized.request)
        request = self.requests[key] = ResponseText(choices[0], self.next_number(), trace)
        request.kept = dataclasses.replace(tokenized, shard="")
        self._list(key, request)
        for opened in choices:
            request.add(opened, self._vocabulary)
        return request

    def keep(self, request: ResponseText, tokenized: Tokenized) -> None:
        """Keep a request as its scheduler sent it."""
        request.kept = tokenized
        if tokenized.checkpoints:
            self.checkpointed[request.number] = request

    def next_number(self) -> int:
        """A number that no request has had: the server's 503s for an earlier client do not concern it."""
        self._last_number += 1
        return self._last_number

    def renumber(self, key: RequestKey) -> None:
        """Another client has the request."""
        request = self.requests[key]
        self.waiting.pop(request.number, None)
        del self._numbers[request.number]
        request.number = self.next_number()
        self._numbers[request.number] = key

    def read_by(self, request: ResponseText, reader: Reader | None) -> None:
        """Set the attached reader of a plain request; None: it has gone."""
        if request.reader is not None:
            self.waiting.pop(request.number, None)
            self.readers.pop(request.reader.number, None)
        request.reader = reader
        if reader is not None:
            self.readers[reader.number] = request

    def key_of(self, number: int) -> RequestKey | None:
        """The key of the request with this number, None if it has ended."""
        return self._numbers.get(number)

    def named(self, tenant: str, request: str) -> list[tuple[RequestKey, ResponseText]]:
        """The open requests with this name: one, or two for a moment during a failover."""
        return [(key, self.requests[key]) for key in self._named.get((tenant, request), ())]

    def hand_over(self, key: RequestKey, scheduler: str) -> None:
        """Move a request to another scheduler; its Opens bring the new sequence numbers."""
        waits = self.requests[key].number in self.waiting
        request = self.forget(key)
        request.torn = 0
        for stream in request.choices.values():
            stream.hand_over()
        new = (scheduler, *key[1:])
        self.requests[new] = request
        self._list(new, request)
        if waits:
            self.waiting[request.number] = request

    def of_scheduler(self, scheduler: str) -> list[RequestKey]:
        """The keys of all requests of one scheduler."""
        return [key for key in self.requests if key[0] == scheduler]

    def forget(self, key: RequestKey) -> ResponseText:
        """Remove a request and its sequences."""
        request = self.requests.pop(key)
        del self._numbers[request.number]
        named = self._named[key[1:]]
        named.remove(key)
        if not named:
            del self._named[key[1:]]
        self.waiting.pop(request.number, None)
        self.checkpointed.pop(request.number, None)
        if request.reader is not None:
            self.readers.pop(request.reader.number, None)
        for seq in request.seqs:
            self.sequences.pop((key[0], seq), None)
        return request

    def _list(self, key: RequestKey, request: ResponseText) -> None:
        self._numbers[request.number] = key
        if request.reader is not None:
            self.readers[request.reader.number] = request
        if request.kept is not None and request.kept.checkpoints:
            self.checkpointed[request.number] = request
        self._named.setdefault(key[1:], []).append(key)


def opened_of(tokenized: Tokenized, choice: int) -> Open:
    """An Open for a choice of an adopted request; `seq` is -1 until a scheduler opens it."""
    return Open(
        seq=-1,
        request=tokenized.request,
        attempt=tokenized.attempt,
        tenant=tokenized.tenant,
        model=tokenized.model,
        inbox=tokenized.inbox,
        choice=choice,
        choices=tokenized.n,
        stream=tokenized.stream,
        format=tokenized.format,
        stop=tokenized.stop,
        include_stop=tokenized.include_stop,
        min_tokens=tokenized.min_tokens,
        logprobs=tokenized.logprobs,
        received_wall_us=tokenized.received_wall_us,
        prompt_tokens=len(tokenized.tokens),
        include_usage=tokenized.include_usage,
        parent_span=tokenized.parent_span,
        stop_ids=tokenized.stop_ids,
        answer_format=tokenized.answer_format,
        most_calls=tokenized.most_calls,
        run=tokenized.run,
    )


@dataclass(slots=True)
class Publish:
    """Send bytes to a client. `number` is the request's, for the reply subject on which the server reports
    that the client has gone."""

    inbox: str
    data: bytes
    number: int
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SendTo:
    """Send a message to a scheduler (`kind.id`)."""

    scheduler: str
    message: StopFound | Ended | Detached | Tokenized | Cancel
    trace: str = ""


@dataclass(frozen=True, slots=True)
class Fault:
    """Log an error: a stream that cannot continue."""

    detail: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The last frame of a request precedes this command. If an Ended follows, it is the request's last."""

    request: ResponseText


Command = Publish | SendTo | Fault | Finished


def detached(key: RequestKey, request: ResponseText, *, moved: bool = False) -> SendTo:
    """The message to a scheduler for a request without a reader here. An adopted request (backups.py) has no
    sequence numbers: it is cancelled by name, since a Detached without any reports lost messages."""
    scheduler, tenant, name = key
    if seqs := request.seqs:
        return SendTo(scheduler, Detached(seqs=seqs, moved=moved))
    return SendTo(scheduler, Cancel(tenant=tenant, request=name, code=MOVED))
