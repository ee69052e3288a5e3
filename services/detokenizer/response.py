"""A `ResponseText` is the reply of one request: its choices, the bytes for its client, and its end.

The shapes follow the OpenAI API; the frames of a stream are numbered:

    accepted  {"type":"accepted","request_id","attempt","frame","model","created","prompt_tokens",
                  "answer_format"?}
    delta     {"type":"delta","request_id","attempt","frame","choices":[
                  {"index","first","count","delta":{"role"?,"content"},"finish_reason":null}]}
    done      {"type":"done","request_id","attempt","frame","model","created","choices":[
                  {"index","tokens","finish_reason","stop_reason"?}],"usage","timings"}
    error     {"type":"error","request_id","attempt","frame","error":{…}}

The first frame after `accepted` that has text, or the last, has `"prompt_logprobs"` on request: a list by
token, in vLLM's form.

A completion has `"text"` in place of `"delta"`, and `"logprobs"` on request. `stop_reason` is the stop string
that ended a choice. The concatenated texts of a choice are its whole answer. `done` and `error` carry the
header `Headrace-End: 1`. Deltas are the hot path: their JSON is formatted by hand around the escaped text.

The reply of a request for a vector has `"embedding"` in place of `"choices"`, and is never a stream.

An attached reader (attach.py) gets the same frames, numbered from 0. Each choice of a delta also has `"at"`,
the characters of the choice before this text, and the first delta counts all tokens so far.

`OpenRequests` holds the open requests of one shard; the commands are the core's output for the actor.

A request has a key and a number; a sequence has a scheduler and a number there.
"""

from __future__ import annotations

import dataclasses
from array import array
from base64 import b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from json.encoder import encode_basestring as quote
from typing import Any

from services.detokenizer.text import (
    Delta,
    LogprobShape,
    Mark,
    Score,
    ScoreReader,
    SequenceStream,
    merged,
)
from shared import messages
from shared.codec import open_of
from shared.errors import HeadraceError, Moved
from shared.replies import error_reply, to_json
from shared.vocab.vocabulary import Vocabulary

MAX_SENT = 256  # deltas kept for a reconnect, then merged into one: each takes 200 bytes
MOVED_WHY = "another reader has attached to this request: it gets the rest of the answer"
MAX_RESENDS = 1_000  # attempts of one detokenizer; the next detokenizer starts above them


@dataclass(frozen=True, slots=True)
class Closed:
    """The end of a choice."""

    tokens: int
    reason: str
    message: messages.Close


class ResponseText:
    """The reply of one request. `number` names it on this shard (see subjects.gone)."""

    __slots__ = (
        "_frames", "_reply", "_sent", "began_us", "choices", "closed", "deaths", "ended", "error", "first_us",
        "inbox", "kept", "number", "opened", "opened_us", "prompt", "reader", "since_us", "torn", "trace",
        "unwanted",
    )  # fmt: skip

    def __init__(self, opened: messages.Open, number: int, trace: str) -> None:
        self.opened = opened
        self.inbox = opened.inbox  # of its client: the one that asked for it, or for its stream by an attach
        self.reader: Reader | None = None  # attached to a plain request
        self.number = number
        self.trace = trace
        self.kept: messages.Tokenized | None = None  # the request, for another scheduler
        self.deaths = 0  # failovers so far
        self.unwanted: HeadraceError | None = None  # why it must not be resumed
        self.torn = 0  # requests to re-open it after lost messages; 0: no message is lost
        self.choices: dict[int, SequenceStream] = {}  # by index
        self.closed: dict[int, Closed] = {}
        self.prompt = PromptScores(opened.prompt_tokens if opened.prompt_logprobs else 0)
        self._frames = FrameBuilder(opened, self.prompt)
        self._sent: list[tuple[int, Delta]] = []  # (choice, delta), kept for a reconnect
        self._reply = b""  # of a plain request, as sent
        self.ended = False
        self.error: HeadraceError | None = None
        self.opened_us = 0  # wall clock, for its spans
        self.first_us = 0  # wall clock: the first text was sent, or added to a plain answer
        self.since_us = 0  # the same two by the monotonic clock, for ages
        self.began_us = 0

    def add(self, opened: messages.Open, vocabulary: Vocabulary) -> SequenceStream:
        """Add a choice."""
        stream = self.choices[opened.choice] = SequenceStream(opened, vocabulary)
        self.prompt.shape = self.prompt.shape or LogprobShape(vocabulary, opened.format == "chat")
        return stream

    def note_opened(self, now_us: int, wall_us: int) -> None:
        """Stamp the opening, the first time only."""
        self.opened_us, self.since_us = self.opened_us or wall_us, self.since_us or now_us

    def note_begun(self, now_us: int, wall_us: int) -> None:
        """Stamp the first text, the first time only."""
        self.first_us, self.began_us = self.first_us or wall_us, self.began_us or now_us

    @property
    def seqs(self) -> array[int]:
        """The sequences of this request at its scheduler, in the order of its choices."""
        return array("i", (s.seq for _, s in sorted(self.choices.items()) if s.seq >= 0))

    def accepted(self) -> bytes:
        """The first frame."""
        return self._frames.accepted()

    def delta(self) -> bytes:
        """A frame with all unsent text; empty if there is none, or the prompt's log probabilities lack."""
        if not self.prompt.is_whole:
            return b""
        waiting = [(i, s.drain()) for i, s in self.choices.items() if s.has_text]
        self._sent += waiting
        if len(self._sent) > MAX_SENT:
            self._sent = self._merged_sent()
        return self._frames.delta(waiting) if waiting else b""

    def start_over(self) -> bytes:
        """The first frame of a new attempt of this stream."""
        self._frames.start_over()
        return self._frames.accepted()

    def all_text(self) -> bytes:
        """The frame after `accepted`, with the whole text so far; empty if there is none."""
        self._frames.rewind()
        return self.rest({})

    def rest(self, has: Mapping[int, int]) -> bytes:
        """The frame after `accepted` for a client that has so many characters of each choice."""
        if not self.prompt.is_whole:
            return b""
        self._sent += [(i, s.drain()) for i, s in self.choices.items() if s.has_text]
        self._sent = self._merged_sent()
        cut = [(i, replace(d, text=d.text[has.get(i, 0) :])) for i, d in self._sent]
        new = [(i, delta) for i, delta in cut if delta.text]
        return self._frames.delta(new) if new else b""

    def text(self, choice: int) -> str:
        """The text of a choice so far."""
        sent = "".join(delta.text for i, delta in self._sent if i == choice)
        return sent + self.choices[choice].unsent if choice in self.choices else ""

    @property
    def attempt(self) -> int:
        """The attempt of its frames."""
        return self._frames.attempt

    def move(self, inbox: str, has: Mapping[int, int], attempt: int) -> bytes:
        """Another reader is the client of this stream. Returns its first frame."""
        self.inbox = inbox
        return self._frames.attach(has, attempt)

    def moved(self) -> bytes:
        """The last frame for the client before `move`."""
        return self._frames.error(Moved(MOVED_WHY), self.trace)

    def _merged_sent(self) -> list[tuple[int, Delta]]:
        """The sent text, one delta for each choice."""
        texts: dict[int, list[Delta]] = {}
        for i, delta in self._sent:
            texts.setdefault(i, []).append(delta)
        return [(i, merged(deltas)) for i, deltas in sorted(texts.items())]

    def last_again(self) -> bytes:
        """The last message once more, after `end` or `failure`."""
        return self.last_frame(self._frames) if self.opened.stream else self._reply

    def close(self, stream: SequenceStream, message: messages.Close) -> int:
        """End one choice. Returns its true number of tokens. Raises TokenGap."""
        tokens = stream.close(message.final, message.reason)
        self.closed[stream.choice] = Closed(tokens, stream.reason, message)
        return tokens

    def on_failed(self, stream: SequenceStream, message: messages.Close) -> None:
        """One choice has failed; the caller fails the request."""
        self.closed[stream.choice] = Closed(message.final, message.reason, message)

    @property
    def is_embedding(self) -> bool:
        """True if the reply is a vector."""
        return self.opened.format in (messages.EMBEDDING, messages.EMBEDDING_BASE64)

    @property
    def is_complete(self) -> bool:
        """True if all choices are closed."""
        return len(self.closed) == self.opened.choices

    def end(self) -> bytes:
        """The last frame of a stream, or the plain reply."""
        self.ended = True
        if self.opened.stream:
            return self.last_frame(self._frames)
        if self.is_embedding:
            self._reply = embedding(self.opened, self.closed[0].message.vector, self._facts())
            return self._reply
        whole = [(self.choices[i].drain(), self._ending(i)) for i in sorted(self.closed)]
        self._reply = answer(self.opened, whole, {**self.prompt.body(), **self._facts()})
        return self._reply

    def last_frame(self, frames: FrameBuilder) -> bytes:
        """The last frame of a stream, after `end` or `failure`."""
        if self.error is not None:
            return frames.error(self.error, self.trace)
        choices: list[dict[str, Any]] = [
            {"index": i, "tokens": closed.tokens, **self._ending(i)}
            for i, closed in sorted(self.closed.items())
        ]
        return frames.done(choices, self._facts())

    def _ending(self, choice: int) -> dict[str, str]:
        """Why a closed choice ended, as fields of its JSON."""
        reason, stop = {"finish_reason": self.closed[choice].reason}, self.choices[choice].stop
        return {**reason, "stop_reason": stop} if stop else reason

    def failure(self, error: HeadraceError) -> bytes:
        """The last frame, or the plain reply, of a failed request."""
        self.ended, self.error = True, error
        if self.opened.stream:
            return self.last_frame(self._frames)
        self._reply = error_reply(error, self.opened.request, self.trace)
        return self._reply

    def _facts(self) -> dict[str, Any]:
        closed = self.closed.values()
        prompt = self.opened.prompt_tokens
        completion = sum(c.tokens for c in closed)
        # The choices share one prompt: cache hits beyond the minimum were computed by another choice.
        cached = min(c.message.usage.cached_tokens for c in closed)
        timings = slowest(c.message.timings for c in closed)
        longest = max(c.tokens for c in closed)
        facts: dict[str, Any] = {"timings": timings_body(timings, prompt, longest)}
        if self.opened.include_usage:
            facts["usage"] = usage_body(prompt, completion, cached)
            counts = [self.choices[i].reasoning_tokens(c.tokens) for i, c in self.closed.items()]
            details = {}
            if reasoning := [count for count in counts if count is not None]:
                details["reasoning_tokens"] = sum(reasoning)
            if all(c.message.accepted_drafts >= 0 for c in closed):
                details["accepted_prediction_tokens"] = sum(c.message.accepted_drafts for c in closed)
                details["rejected_prediction_tokens"] = sum(c.message.rejected_drafts for c in closed)
            if details:
                facts["usage"]["completion_tokens_details"] = details
        return facts


class Reader:
    """An attached reader of a plain request: it gets frames of the text that the answer is collected from.
    `number` is a request's number for the frames alone."""

    __slots__ = ("_marks", "frames", "inbox", "number")

    def __init__(self, request: ResponseText, inbox: str, number: int) -> None:
        self.inbox = inbox
        self.number = number
        self.frames = FrameBuilder(request.opened, request.prompt)
        self._marks: dict[int, Mark] = {}

    def begin(self, has: Mapping[int, int], attempt: int) -> bytes:
        """The first frame, for a reader that has so many characters of each choice."""
        self._marks = {choice: Mark(chars) for choice, chars in has.items()}
        return self.frames.attach(has, attempt)

    def delta(self, choices: Mapping[int, SequenceStream]) -> bytes:
        """A frame with all text that is new to it; empty if there is none."""
        if not self.frames.prompt.is_whole:
            return b""
        found = [(i, s.since(self._marks.setdefault(i, Mark()))) for i, s in sorted(choices.items())]
        new = [(i, delta) for i, delta in found if delta is not None]
        return self.frames.delta(new) if new else b""


class PromptScores:
    """The log probabilities of a request's prompt, whose `tokens` are 0 without any. They arrive in order,
    and again from another scheduler; the first ones stay."""

    __slots__ = ("_ranks", "_scores", "_tokens", "shape")

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._scores: list[Score] = []
        self._ranks = array("i")
        self.shape: LogprobShape | None = None

    def add(self, piece: messages.PromptTokens) -> None:
        """Take a piece: what is new of it, if it follows."""
        known = len(self._scores) - piece.first
        if known >= 0:
            self._scores += ScoreReader(piece).next_row(len(piece.ids))[known:]
            self._ranks += piece.ranks[known:]

    @property
    def is_whole(self) -> bool:
        """True if no log probability is awaited."""
        return len(self._scores) >= self._tokens

    def body(self) -> dict[str, Any]:
        """The field of an answer or frame; nothing if the request asks for none."""
        if not self._tokens or self.shape is None:
            return {}
        return {"prompt_logprobs": self.shape.prompt(self._scores, self._ranks)}


def slowest(timings: Iterable[messages.Timings]) -> messages.Timings:
    """The timings of the slowest choice."""
    return max(timings, key=lambda t: t.queue_us + t.prefill_us + t.decode_us)


class FrameBuilder:
    """Numbers and builds the frames of one request's stream."""

    __slots__ = (
        "_about",
        "_accepted",
        "_at",
        "_chat",
        "_frame",
        "_prefix",
        "_prompt_sent",
        "_request",
        "_role_sent",
        "attempt",
        "prompt",
    )

    def __init__(self, opened: messages.Open, prompt: PromptScores) -> None:
        self._request = opened.request
        self.prompt, self._prompt_sent = prompt, False
        self.attempt = (opened.attempt - 1) * MAX_RESENDS + 1
        created = opened.received_wall_us // 1_000_000
        self._about = {"model": opened.model, "created": created, **_run_of(opened)}
        self._accepted = {"prompt_tokens": opened.prompt_tokens, **_format_of(opened)}
        self._chat = opened.format == "chat"
        self._frame = 0
        self._role_sent: set[int] = set()
        self._at: dict[int, int] | None = None  # characters sent of each choice, to an attached reader
        self._prefix = self._delta_prefix()

    def attach(self, has: Mapping[int, int], attempt: int) -> bytes:
        """Another reader gets the frames from now on; it has so many characters of each choice. Returns its
        first frame."""
        self.attempt, self._frame, self._at = attempt, 0, dict(has)
        self._prompt_sent = False
        self._role_sent = {choice for choice, chars in has.items() if chars}
        self._prefix = self._delta_prefix()
        return self.accepted()

    def start_over(self) -> None:
        """Start a new attempt."""
        self.attempt += 1
        self._frame, self._prompt_sent = 0, False
        self._prefix = self._delta_prefix()

    def rewind(self) -> None:
        """Restart the numbers after `accepted`: the frames built since then were not sent."""
        self._frame, self._prompt_sent = 1, False
        self._role_sent.clear()
        if self._at is not None:
            self._at.clear()

    def _delta_prefix(self) -> str:
        head = f'"request_id":{quote(self._request)},"attempt":{self.attempt},"frame":'
        return f'{{"type":"delta",{head}'

    def accepted(self) -> bytes:
        """The first frame: the request is queued."""
        return to_json({**self._head("accepted"), **self._about, **self._accepted})

    def delta(self, choices: Iterable[tuple[int, Delta]]) -> bytes:
        """A frame with new text of one or more choices."""
        number, self._frame = self._frame, self._frame + 1
        parts = [self._choice(index, delta) for index, delta in choices]
        more = "".join(f',"{name}":{to_json(value).decode()}' for name, value in self._prompt_once().items())
        return f'{self._prefix}{number},"choices":[{",".join(parts)}]{more}}}'.encode()

    def _prompt_once(self) -> dict[str, Any]:
        """The log probabilities of the prompt, for the first frame that may have them."""
        sent, self._prompt_sent = self._prompt_sent, True
        return {} if sent else self.prompt.body()

    def _choice(self, index: int, delta: Delta) -> str:
        text = quote(delta.text)
        if not self._chat:
            body = f'"text":{text}'
        elif index in self._role_sent:
            body = f'"delta":{{"content":{text}}}'
        else:
            self._role_sent.add(index)
            body = f'"delta":{{"role":"assistant","content":{text}}}'
        if delta.logprobs is not None:
            body = f'{body},"logprobs":{to_json(delta.logprobs).decode()}'
        if self._at is not None:
            at = self._at.get(index, 0)
            self._at[index] = at + len(delta.text)
            body = f'"at":{at},{body}'
        return f'{{"index":{index},"first":{delta.first},"count":{delta.count},{body},"finish_reason":null}}'

    def done(self, choices: list[dict[str, Any]], facts: Mapping[str, Any]) -> bytes:
        """The last frame of an answer; `facts` holds usage and timings."""
        return to_json(
            {**self._head("done"), **self._about, "choices": choices, **self._prompt_once(), **facts}
        )

    def error(self, error: HeadraceError, trace: str) -> bytes:
        """The last frame of a failed request."""
        return error_reply(error, self._request, trace, self._head("error"))

    def _head(self, kind: str) -> dict[str, Any]:
        number, self._frame = self._frame, self._frame + 1
        return {"type": kind, "request_id": self._request, "attempt": self.attempt, "frame": number}


def answer(
    opened: messages.Open, whole: list[tuple[Delta, dict[str, str]]], facts: Mapping[str, Any]
) -> bytes:
    """The reply of a plain request; `whole` is (text, fields of its end) by choice."""
    chat = opened.format == "chat"

    def choice(index: int, delta: Delta, ending: dict[str, str]) -> dict[str, Any]:
        text = delta.text
        body = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        return {"index": index, **body, "logprobs": delta.logprobs, **ending}

    return to_json(
        {
            "id": opened.request,
            "object": "chat.completion" if chat else "text_completion",
            "created": opened.received_wall_us // 1_000_000,
            "model": opened.model,
            "choices": [choice(i, delta, ending) for i, (delta, ending) in enumerate(whole)],
            **_format_of(opened),
            **_run_of(opened),
            **facts,
        }
    )


def embedding(opened: messages.Open, vector: bytes, facts: Mapping[str, Any]) -> bytes:
    """The reply of a request for a vector."""
    numbers: Any = b64encode(vector).decode()
    if opened.format == messages.EMBEDDING:
        numbers = [float(f"{number:.9g}") for number in array("f", vector)]  # exact in float32
    return to_json(
        {
            "id": opened.request,
            "object": "embedding",
            "created": opened.received_wall_us // 1_000_000,
            "model": opened.model,
            "embedding": numbers,
            **facts,
        }
    )


def _format_of(opened: messages.Open) -> dict[str, str]:
    return {"answer_format": opened.answer_format} if opened.answer_format else {}


def _run_of(opened: messages.Open) -> dict[str, int]:
    return {"run": opened.run} if opened.run else {}


def usage_body(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """OpenAI's `usage`."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def timings_body(timings: messages.Timings, prompt: int, completion: int) -> dict[str, float]:
    """Durations in milliseconds and rates in tokens per second. Prefill makes the first token, decode the
    others."""
    waited_us = timings.received_us + timings.tokenize_us + timings.transit_us + timings.queue_us
    first_us = waited_us + timings.prefill_us
    return {
        "tokenize_ms": _ms(timings.tokenize_us),
        "queue_ms": _ms(timings.queue_us),
        "prefill_ms": _ms(timings.prefill_us),
        "ttft_ms": _ms(first_us),
        "decode_ms": _ms(timings.decode_us),
        "total_ms": _ms(first_us + timings.decode_us),
        "prompt_per_second": _rate(prompt, timings.prefill_us),
        "predicted_per_second": _rate(completion - 1, timings.decode_us),
    }


def _ms(us: int) -> float:
    return round(us / 1000, 3)


def _rate(tokens: int, us: int) -> float:
    return round(tokens * 1e6 / us, 1) if us > 0 and tokens > 0 else 0.0


RequestKey = tuple[str, str, str]  # scheduler, tenant, request


class OpenRequests:
    """The open requests of one shard. Only this class adds and removes them."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.sequences: dict[tuple[str, int], tuple[SequenceStream, ResponseText]] = {}
        self.requests: dict[RequestKey, ResponseText] = {}
        self.waiting: dict[int, ResponseText] = {}  # those with text to send, by number
        self.readers: dict[int, ResponseText] = {}  # plain requests, by the number of their attached reader
        self.savepointed: dict[int, ResponseText] = {}  # those whose tokens are kept, by number
        self._vocabulary = vocabulary
        self._numbers: dict[int, RequestKey] = {}
        self._named: dict[tuple[str, str], list[RequestKey]] = {}
        self._last_number = 0

    def add(self, scheduler: str, opened: messages.Open, trace: str) -> tuple[ResponseText | None, bool]:
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

    def adopt(self, scheduler: str, tokenized: messages.Tokenized, trace: str) -> ResponseText:
        """Add a request from its backup or savepoint, without tokens, as a lost request of its scheduler."""
        choices = [opened_of(tokenized, choice) for choice in range(tokenized.n)]
        key = (scheduler, tokenized.tenant, tokenized.request)
        request = self.requests[key] = ResponseText(choices[0], self.next_number(), trace)
        request.kept = dataclasses.replace(tokenized, shard="")
        self._list(key, request)
        for opened in choices:
            request.add(opened, self._vocabulary)
        return request

    def keep_tokenized(self, request: ResponseText, tokenized: messages.Tokenized) -> None:
        """Keep a request as its scheduler sent it."""
        request.kept = tokenized
        if tokenized.savepoints:
            self.savepointed[request.number] = request

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

    def set_reader(self, request: ResponseText, reader: Reader | None) -> None:
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
        self.savepointed.pop(request.number, None)
        if request.reader is not None:
            self.readers.pop(request.reader.number, None)
        for seq in request.seqs:
            self.sequences.pop((key[0], seq), None)
        return request

    def _list(self, key: RequestKey, request: ResponseText) -> None:
        self._numbers[request.number] = key
        if request.reader is not None:
            self.readers[request.reader.number] = request
        if request.kept is not None and request.kept.savepoints:
            self.savepointed[request.number] = request
        self._named.setdefault(key[1:], []).append(key)


def opened_of(tokenized: messages.Tokenized, choice: int) -> messages.Open:
    """An Open for a choice of an adopted request; `seq` is -1 until a scheduler opens it."""
    attempt, prompt_tokens = tokenized.attempt, len(tokenized.tokens)
    return open_of(tokenized, seq=-1, attempt=attempt, choice=choice, prompt_tokens=prompt_tokens)


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
    message: messages.StopFound | messages.Ended | messages.Detached | messages.Tokenized | messages.Cancel
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
    """The message to a scheduler for a request without a reader here. An adopted request (failover.py) has no
    sequence numbers: it is cancelled by name, since a Detached without any reports lost messages."""
    scheduler, tenant, name = key
    if seqs := request.seqs:
        return SendTo(scheduler, messages.Detached(seqs=seqs, moved=moved))
    return SendTo(scheduler, messages.Cancel(tenant=tenant, request=name, code=messages.MOVED))
