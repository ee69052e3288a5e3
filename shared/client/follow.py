"""`Followed` is what the reader of a request has, and the frames that it gets next. Pure (`Client.follow`).

    attach ──accepted──▶ pinned ──delta, in order──▶ … ──done──▶ ended
      ▲                    │ a frame is missing, or none comes
      └────────────────────┘ attach again, with what has come so far

The frames that it gives are numbered for its reader: the attempt goes up when the text starts over, and only
then. It takes frames of one detokenizer at a time, the one that has answered the latest attach.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from shared.errors import Moved, UnknownRequest
from shared.replies import HASH_DIGITS, text_hash

Body = dict[str, Any]
FIRST_PAUSE_S, LAST_PAUSE_S = 0.02, 0.25  # until an attach without an answer is repeated
FEW_TRIES = 4
UNKNOWN_S = 2.0  # of these tries, for the detokenizer that has the request
NO_KEEPER_S = 3.5  # the same without a keeper, which is the last service that `up` starts
RESUME_S = 30.0  # for a stream to continue after a death or an outage: far longer than the services take
LOST_S = 600.0  # without a sign of a durable request: its fleet should be back by then
ENDED = ("completed", "failed", "cancelled")  # states of a durable request


class AttachAgain(Exception):
    """A frame is missing, or the detokenizer has a backlog: attach again."""


class Had:
    """The text of one choice that the reader has."""

    def __init__(self, text: str = "") -> None:
        self.chars = 0
        self._hash = sha256()
        self.add(text)

    def add(self, text: str) -> None:
        """The next piece."""
        self.chars += len(text)
        self._hash.update(text.encode("utf-8", "replace"))

    @property
    def digest(self) -> str:
        """As `text_hash` of the whole."""
        return self._hash.hexdigest()[:HASH_DIGITS]


@dataclass(slots=True)
class Followed:
    """One reader's place. `start`: the text of each choice that it has."""

    request_id: str
    start: Mapping[int, str] = field(default_factory=dict)
    attempt: int = 0  # of the frames that it gets; 0: none yet
    ended: bool = False
    latest: str = ""  # the inbox of the latest attach
    pin: tuple[str, str] | None = None  # inbox and sender whose frames are taken
    _had: dict[int, Had] = field(default_factory=dict)
    _begun: bool = False
    _frame: int = 0  # the next one it gets
    _taken: tuple[int, int] = (0, 0)  # attempt and number of the next frame of the detokenizer

    def __post_init__(self) -> None:
        self._had = {index: Had(text) for index, text in self.start.items() if text}
        self.attempt = 1 if self._had else 0  # so that a text which starts over has a higher one

    def attach(self, inbox: str) -> Body:
        """The body of an attach whose frames go to `inbox`."""
        self.latest = inbox
        had = {str(i): {"chars": each.chars, "hash": each.digest} for i, each in self._had.items()}
        return {"choices": had, "attempt": self.attempt}

    @property
    def was_answered(self) -> bool:
        """True if the latest attach was answered."""
        return self.pin is not None and self.pin[0] == self.latest

    def accept(self, inbox: str, sender: str, frame: Body) -> Body | None:
        """The frame as the reader gets it; None if it is not for the reader. Raises AttachAgain."""
        if frame["type"] == "accepted" and self._is_expected(inbox, int(frame["attempt"])):
            self.pin, self._taken = (inbox, sender), (int(frame["attempt"]), 1)
            return self._begin(frame)
        if (inbox, sender) != self.pin:
            return None
        if (frame["attempt"], frame["frame"]) != self._taken:
            self.pin = None
            raise AttachAgain
        self._taken = (self._taken[0], self._taken[1] + 1)
        if frame["type"] == "delta":
            self._read(frame)
        self.ended = frame["type"] == "done"
        return self._numbered(frame)

    def can_ignore(self, inbox: str, sender: str, error: Mapping[str, Any]) -> bool:
        """True for an error that is not of the latest attach, and does not end this reader."""
        if "attempt" not in error:  # the attach was refused
            return inbox != self.latest
        if (inbox, sender) != self.pin:
            return True
        return not self.was_answered and error["error"].get("type") == Moved.type  # by the attach after it

    def of_record(self, record: Mapping[str, Any]) -> Iterator[Body]:
        """The frames of a stored answer, from where the reader is."""
        answer = record["answer"]
        texts = {int(c["index"]): text_of(c) for c in answer["choices"]}
        scored = any(choice.get("logprobs") for choice in answer["choices"])
        has = [index for index, had in self._had.items() if had.chars]
        if has and (scored or not all(self._has_start(index, texts.get(index, "")) for index in has)):
            self._restart(0)
        usage = answer.get("usage") or {}
        about = {name: answer[name] for name in ("model", "created", "run") if name in answer}
        more = {"prompt_tokens": usage["prompt_tokens"]} if usage else {}
        if "answer_format" in answer:
            more["answer_format"] = answer["answer_format"]
        head = {"type": "accepted", "request_id": self.request_id, "attempt": 0, "frame": 0}
        if not self._begun or not self._frame:
            yield self._first({**head, **about, **more}, 1)
        tokens = usage.get("completion_tokens") if len(texts) == 1 else None
        choices = [self._stored(choice, texts[int(choice["index"])], tokens) for choice in answer["choices"]]
        if new := [choice for choice in choices if choice is not None]:
            yield self._numbered({**head, "type": "delta", "choices": new})
        ends = [_end(choice, tokens) for choice in answer["choices"]]
        facts = {name: answer[name] for name in ("timings", "usage") if name in answer}
        self.ended = True
        yield self._numbered({**head, "type": "done", **about, "choices": ends, **facts})

    # ---- internals ------------------------------------------------------------------------------

    def _is_expected(self, inbox: str, attempt: int) -> bool:
        """The answer to the latest attach, or a text that starts over."""
        return attempt > self.attempt > 0 or (inbox == self.latest and not self.was_answered)

    def _begin(self, frame: Body) -> Body | None:
        """The first frame for a reader that begins, or starts over; none for one that goes on."""
        attempt = int(frame["attempt"])
        if self._begun and attempt <= self.attempt:
            return None
        if attempt > self.attempt > 0:
            self._restart(attempt)
        return self._first(frame, attempt)

    def _first(self, frame: Body, attempt: int) -> Body:
        self._begun, self._frame, self.attempt = True, 0, self.attempt or attempt
        return self._numbered(frame)

    def _restart(self, attempt: int) -> None:
        self._had.clear()
        self._frame, self.attempt = 0, max(self.attempt + 1, attempt)

    def _numbered(self, frame: Body) -> Body:
        number, self._frame = self._frame, self._frame + 1
        return {**frame, "attempt": self.attempt, "frame": number}

    def _read(self, frame: Body) -> None:
        for choice in frame["choices"]:
            had = self._had.setdefault(int(choice["index"]), Had())
            if choice["at"] != had.chars:
                self.pin = None
                raise AttachAgain
            had.add(text_of(choice))

    def _has_start(self, index: int, text: str) -> bool:
        had = self._had[index]
        return len(text) >= had.chars and text_hash(text[: had.chars]) == had.digest

    def _stored(self, choice: Mapping[str, Any], text: str, tokens: int | None) -> Body | None:
        """A stored choice as that of a delta; None if the reader has it all."""
        index = int(choice["index"])
        had = self._had.setdefault(index, Had())
        at, new = had.chars, text[had.chars :]
        if not new:
            return None
        had.add(new)
        role = {} if at else {"role": "assistant"}
        body = {"text": new} if "text" in choice else {"delta": {**role, "content": new}}
        covers = {} if tokens is None else {"first": 0, "count": tokens}
        scores = {"logprobs": choice["logprobs"]} if choice.get("logprobs") else {}
        return {"index": index, **covers, "at": at, **body, **scores, "finish_reason": None}


@dataclass(slots=True)
class Patience:
    """How long a reader waits for a sign of its request. Times are seconds of one clock."""

    sign_s: float
    pause_s: float = FIRST_PAUSE_S
    _tries: int = 0
    _received: bool = False
    _durable: bool = False

    def frame_came(self, now_s: float) -> None:
        """A frame has come."""
        self._received, self.sign_s, self._tries, self.pause_s = True, now_s, 0, FIRST_PAUSE_S

    def on_known(self, now_s: float) -> None:
        """A detokenizer has the request."""
        self.sign_s, self._tries = now_s, 0

    def is_over(self, state: Mapping[str, Any], now_s: float) -> bool:
        """An attach was not answered, and the keeper has answered `state`: empty if there is none. True if
        nothing more is to be expected."""
        self._tries, self.pause_s = self._tries + 1, min(2 * self.pause_s, LAST_PAUSE_S)
        if "status" in state:
            self._durable, self.sign_s = True, now_s
            return False
        unknown = bool(state) and state["error"].get("code") == UnknownRequest.code
        if self._durable:
            limit_s = UNKNOWN_S if unknown else LOST_S
        else:
            limit_s = RESUME_S if self._received else UNKNOWN_S if state else NO_KEEPER_S
        return self._tries >= FEW_TRIES and now_s - self.sign_s >= limit_s


def text_of(choice: Mapping[str, Any]) -> str:
    """The text of a choice, of a frame or of an answer."""
    if "text" in choice:
        return str(choice["text"])
    return str((choice.get("delta") or choice.get("message") or {}).get("content") or "")


def _end(choice: Mapping[str, Any], tokens: int | None) -> Body:
    """The end of a stored choice, as `done` has it."""
    ends = {name: choice[name] for name in ("finish_reason", "stop_reason") if name in choice}
    counted = {} if tokens is None else {"tokens": tokens}
    return {"index": choice["index"], **counted, **ends}
