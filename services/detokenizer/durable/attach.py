"""`Attachments` gives a running request another reader, from the character on that it has not got. Pure.

    plain request ──attach──▶ the reader is a further one; the reply to its client stays as it is
    stream        ──attach──▶ the reader is its client from now on; the one before gets the error `moved`

A reader sends how many characters of each choice it has, and their hash. If the text does not start with
them it is sent from its start, under a higher attempt. A request has one attached reader: a newer one
replaces it. Ended requests are not known here. Readers of plain requests are dropped when the broker is lost,
and attach again. Two detokenizers may have a request for a moment; one that opens it anew knows only its
first client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from services.detokenizer.reconnect import Reconnect
from services.detokenizer.response import (
    MOVED_WHY,
    Command,
    OpenRequests,
    Publish,
    Reader,
    RequestKey,
    ResponseText,
)
from shared import bodies
from shared.errors import BadRequest, HeadraceError, Moved, Overloaded, PayloadTooLarge
from shared.replies import HASH_DIGITS, end_headers, error_reply, text_hash

MAX_BYTES = 65_536  # of a question: 64 choices take 4,000
BUSY_MS = 250  # to try again: a backlog leaves within this time, or the broker is away
FORM = 'send {"choices": {"0": {"chars": 5, "hash": "…"}}, "attempt": 1}, or nothing if you have no text'


@dataclass(frozen=True, slots=True)
class Start:
    """What a reader has: characters and their hash by choice, and the attempt of its last frame (0: none).
    `leaves`: it wants no more."""

    choices: Mapping[int, tuple[int, str]]
    attempt: int = 0
    leaves: bool = False

    @classmethod
    def read(cls, body: bytes) -> Start:
        """The body of an attach. Raises BadRequest, PayloadTooLarge."""
        if len(body) > MAX_BYTES:
            raise PayloadTooLarge(f"{len(body)} bytes to attach are over {MAX_BYTES}: {FORM}")
        try:
            asked = bodies.asked(bodies.Attach, body)
            choices = {int(index): _had(had) for index, had in asked.get("choices", {}).items()}
        except (BadRequest, ValueError):
            raise BadRequest(f"the place to go on from is not clear: {FORM}", param="choices") from None
        return cls(choices, asked.get("attempt", 0), asked.get("leave", False))


def _had(had: bodies.Had) -> tuple[int, str]:
    chars, digest = had["chars"], had.get("hash", "")
    if chars and len(digest) != HASH_DIGITS:
        raise ValueError
    return chars, digest


class Attachments:
    """The attached readers of one shard."""

    def __init__(self, table: OpenRequests, reconnect: Reconnect) -> None:
        self._table = table
        self._reconnect = reconnect

    def attach(self, tenant: str, name: str, inbox: str, body: bytes, *, full: bool) -> list[Command]:
        """The answer to an attach: `accepted` and the text so far; nothing for a request that is not open
        here. `full`: too much waits to leave this process."""
        found = self._table.named(tenant, name)
        if not found or self._reconnect.is_away:
            return []
        key, request = max(found, key=lambda each: each[1].opened.attempt)
        try:
            start = Start.read(body)
            if full and not start.leaves:
                raise Overloaded("this detokenizer has a backlog: attach again", retry_after_ms=BUSY_MS)
        except HeadraceError as error:
            return [Publish(inbox, error_reply(error, name, request.trace), 0, end_headers(error))]
        if start.leaves:
            if request.reader is not None and request.reader.inbox == inbox:
                self._table.set_reader(request, None)
            return []
        return (
            self._move(key, request, inbox, start)
            if request.opened.stream
            else self._copy(request, inbox, start)
        )

    def _move(self, key: RequestKey, request: ResponseText, inbox: str, start: Start) -> list[Command]:
        has, attempt = _place(request, start)
        commands: list[Command] = []
        if request.inbox != inbox:
            headers = end_headers(Moved(MOVED_WHY), request.trace)
            commands.append(Publish(request.inbox, request.moved(), request.number, headers))
        self._reconnect.forget(request.number)
        self._table.renumber(key)
        commands.append(Publish(inbox, request.move(inbox, has, attempt), request.number))
        if rest := request.rest(has):
            commands.append(Publish(inbox, rest, request.number))
        return commands

    def _copy(self, request: ResponseText, inbox: str, start: Start) -> list[Command]:
        has, attempt = _place(request, start)
        commands: list[Command] = []
        if (before := request.reader) is not None and before.inbox != inbox:
            error = Moved(MOVED_WHY)
            data = before.frames.error(error, request.trace)
            commands.append(Publish(before.inbox, data, before.number, end_headers(error, request.trace)))
        reader = Reader(request, inbox, self._table.next_number())
        self._table.set_reader(request, reader)
        commands.append(Publish(inbox, reader.begin(has, attempt), reader.number))
        if rest := reader.delta(request.choices):
            commands.append(Publish(inbox, rest, reader.number))
        return commands


def _place(request: ResponseText, start: Start) -> tuple[dict[int, int], int]:
    """How many characters of each choice the reader has, and the attempt of the frames. A text with log
    probabilities is sent from its start: the token of a character is not known."""
    has = {choice: chars for choice, (chars, _) in start.choices.items() if chars}
    fits = not (has and request.opened.logprobs) and all(
        _has_start(request.text(choice), *start.choices[choice]) for choice in has
    )
    if fits:
        return has, start.attempt or request.attempt
    return {}, max(start.attempt, request.attempt) + 1


def _has_start(text: str, chars: int, digest: str) -> bool:
    return len(text) >= chars and text_hash(text[:chars]) == digest
