"""An `OpenRequests` holds the open requests of one shard. The commands are what the core tells its shell to
do.

A request is found by its key or its number, a sequence by its scheduler and its number there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.detokenizer.response import ResponseText
from services.detokenizer.text import SequenceStream
from shared.messages import MOVED, Cancel, Detached, Ended, Open, StopFound, Tokenized
from shared.vocab.vocabulary import Vocabulary

RequestKey = tuple[str, str, str]  # scheduler, tenant, request


class OpenRequests:
    """The open requests; the one place that adds and forgets them."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.sequences: dict[tuple[str, int], tuple[SequenceStream, ResponseText]] = {}
        self.requests: dict[RequestKey, ResponseText] = {}
        self.waiting: dict[int, ResponseText] = {}  # streams with text to send, by number
        self._vocabulary = vocabulary
        self._numbers: dict[int, RequestKey] = {}
        self._named: dict[tuple[str, str], list[RequestKey]] = {}
        self._last_number = 0

    def add(self, scheduler: str, opened: Open, trace: str) -> tuple[ResponseText | None, bool]:
        """Place a sequence: (its request or None for a duplicate or outdated Open, whether the
        request is new). A higher attempt replaces an earlier one."""
        key = (scheduler, opened.tenant, opened.request)
        request = self.requests.get(key)
        if request is not None and opened.attempt > request.opened.attempt:
            self.forget(key)
            request = None
        fresh = request is None
        if request is None:
            self._last_number += 1
            request = self.requests[key] = ResponseText(opened, self._last_number, trace)
            self._list(key, request)
        elif opened.attempt < request.opened.attempt:
            return None, False
        elif (known := request.choices.get(opened.choice)) is not None:
            if known.seq >= 0:
                return None, False
            known.seq = opened.seq  # of the scheduler that goes on with it
            if opened.choice not in request.closed:
                self.sequences[scheduler, opened.seq] = (known, request)
            return request, False
        self.sequences[scheduler, opened.seq] = (request.add(opened, self._vocabulary), request)
        return request, fresh

    def adopt(self, scheduler: str, tokenized: Tokenized, trace: str) -> ResponseText:
        """Place a request of which no token is known, as one that its scheduler has lost."""
        choices = [opened_of(tokenized, choice) for choice in range(tokenized.n)]
        self._last_number += 1
        key = (scheduler, tokenized.tenant, tokenized.request)
        request = self.requests[key] = ResponseText(choices[0], self._last_number, trace)
        request.kept = dataclasses.replace(tokenized, shard="")
        self._list(key, request)
        for opened in choices:
            request.add(opened, self._vocabulary)
        return request

    def key_of(self, number: int) -> RequestKey | None:
        """The request with this number, if it is still open."""
        return self._numbers.get(number)

    def named(self, tenant: str, request: str) -> list[tuple[RequestKey, ResponseText]]:
        """The open requests of this name: one, but for a moment when it goes to another scheduler."""
        return [(key, self.requests[key]) for key in self._named.get((tenant, request), ())]

    def hand_over(self, key: RequestKey, scheduler: str) -> None:
        """Another scheduler goes on with a request, under its own numbers: its Opens bring them."""
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
        """All requests of one scheduler."""
        return [key for key in self.requests if key[0] == scheduler]

    def forget(self, key: RequestKey) -> ResponseText:
        """The request has ended; its sequences go with it."""
        request = self.requests.pop(key)
        del self._numbers[request.number]
        named = self._named[key[1:]]
        named.remove(key)
        if not named:
            del self._named[key[1:]]
        self.waiting.pop(request.number, None)
        for seq in request.seqs:
            self.sequences.pop((key[0], seq), None)
        return request

    def _list(self, key: RequestKey, request: ResponseText) -> None:
        self._numbers[request.number] = key
        self._named.setdefault(key[1:], []).append(key)


def opened_of(tokenized: Tokenized, choice: int) -> Open:
    """The Open of a choice that nobody has opened yet, for the next attempt at its reader."""
    return Open(
        seq=-1,
        request=tokenized.request,
        attempt=tokenized.attempt + 1,
        tenant=tokenized.tenant,
        model=tokenized.model,
        inbox=tokenized.inbox,
        choice=choice,
        choices=tokenized.n,
        stream=tokenized.stream,
        format=tokenized.format,
        stop=tokenized.stop,
        include_stop=tokenized.include_stop,
        logprobs=tokenized.logprobs,
        received_wall_us=tokenized.received_wall_us,
        prompt_tokens=len(tokenized.tokens),
        include_usage=tokenized.include_usage,
        parent_span=tokenized.parent_span,
        stop_ids=tokenized.stop_ids,
    )


@dataclass(slots=True)
class Publish:
    """Send bytes to a client. `number` is the request's, for the reply subject on which the server
    says that nobody listens."""

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
    """Something to log: a stream that could not be continued."""

    detail: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The last frame of a request precedes this. The Ended that follows, if any, is its last one."""

    request: ResponseText


Command = Publish | SendTo | Fault | Finished


def detached(key: RequestKey, request: ResponseText, *, moved: bool = False) -> SendTo:
    """For a scheduler whose request nobody reads here. Of one that was adopted (backups.py) it has not told
    us the sequences, and of none would mean that messages were lost."""
    scheduler, tenant, name = key
    if seqs := request.seqs:
        return SendTo(scheduler, Detached(seqs=seqs, moved=moved))
    return SendTo(scheduler, Cancel(tenant=tenant, request=name, code=MOVED))
