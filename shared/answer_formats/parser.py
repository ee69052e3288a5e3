"""`AnswerParser` separates an answer, as it arrives, into reasoning, content and calls of functions. Pure.

    start ──▶ reasoning ──▶ content ◀──▶ calls          as data: formats.py
              (opened by the prompt or by a marker)

The parts of any split of an answer join to the same result. Only these characters are held back: a possible
marker, white space before one, the head of a call up to its name (MAX_HEAD), and calls or arguments that have
no value before their end (MAX_HELD). Text that does not parse as a call is content, with its markers. The
text after the head of a call is its arguments, as the model wrote them. White space around parts is dropped.

Counts the tokens of an answer that are reasoning. Pure.

The parser (parser.py) finds the reasoning in the text. A token with any byte of it counts, so the count is
exact but for the token at each border, which may have other text, too. Markers, and white space beside them,
are no reasoning.

Names the functions that a whole answer calls.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from shared.answer_formats import formats, notations
from shared.answer_formats.arguments import Argument
from shared.answer_formats.reader import (
    ARGUMENTS,
    CALL,
    CONTENT,
    MAX_HEAD,
    MAX_HELD,
    NO_LIMIT,
    REASONING,
    Part,
    Reader,
    Scan,
    Text,
    Truth,
)

_SCALAR = re.compile(r"\s*([^\s,}\]<]{1,64})(?=[\s,}\]<])")
_CHANNEL, _RECIPIENT = (
    re.compile("analysis|commentary|final"),
    re.compile(rf"\bto=(?:functions\.)?{formats.NAME}"),
)
_MESSAGE = re.compile(r"(?P<head>.*?)<\|message\|>", re.DOTALL)
_STARTS = ("<|start|>", "<|channel|>")
_ENDS = (*_STARTS, "<|end|>", "<|return|>", "<|call|>")

# None: a call was read; else the text that was passed over and is no call.
NoCall = Generator[None, None, str | None]


# A JSON object up to its arguments. A key with one short value may precede the name.
_HEAD_OF_OBJECT = re.compile(
    r'\s*\{\s*(?:"(?!name"|tool_name"|arguments"|parameters")\w{1,32}"\s*:\s*(?:"[^"\\]{0,128}"|\d{1,9}|null)\s*,\s*)?'
    r'"(?:tool_)?name"\s*:\s*"(?P<name>[^"\\\x00-\x1f]{1,130})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\S)'
)


def _python_or_json(text: str) -> notations.Calls | None:
    return notations.python_calls(text) or notations.json_calls(text)


class AnswerParser:
    """Reads one answer: `feed` its pieces, then `finish`."""

    def __init__(
        self,
        form: formats.Format,
        *,
        thinking: bool = False,
        tools: Mapping[str, Any] | None = None,
        parallel: bool = True,
    ) -> None:
        """`thinking`: the prompt opens the reasoning. `tools`: the schemas of the functions by name; without
        them the answer has no calls. `parallel`: it may have more than one."""
        self._form = form
        self._tools = tools or {}
        self._most = (NO_LIMIT if parallel else 1) if tools is not None else 0
        self._bare = False  # no marker stands before the call that is read
        self._reader = Reader()
        channels = isinstance(form.notations[0], formats.Channels)
        self._machine = self._channels() if channels else self._answer(thinking)

    @property
    def calls(self) -> int:
        """The number of calls so far."""
        return self._reader.calls

    @property
    def decided(self) -> int:
        """How many characters of the answer are known to be content or not."""
        place, since = self._reader.place, self._reader.since
        return place if since is None else since

    def content(self) -> list[tuple[int, int]]:
        """Where content stands in the text of the answer, as begins and ends, since the last time."""
        found, self._reader.content = self._reader.content, []
        return found

    def feed(self, piece: str, *, last: bool = False) -> list[Part]:
        """The parts that `piece` completes."""
        reader = self._reader
        reader.add(piece, last=last)
        next(self._machine, None)
        parts, reader.parts = reader.parts, []
        return parts

    def finish(self) -> list[Part]:
        """The last parts."""
        parts = self.feed("", last=True)
        rest, self._reader.spaces = self._reader.spaces, ""
        return [*parts, Part(CONTENT, rest)] if rest and not self.calls else parts

    # ---- the whole answer ------------------------------------------------------------------------

    def _answer(self, thinking: bool) -> Truth:
        form, reader = self._form, self._reader
        opens = form.opens if self._most else ()
        if form.think is not None:
            thinking = thinking or bool((yield from reader.literal(form.think[0])))
        if form.think is not None and thinking:
            yield from reader.literal(form.think[0])  # some models open it again
            reader.change_kind()
            ends = (form.think[1], *(opens if form.calls_end_reasoning else ()))
            found = yield from reader.until(ends, partial(reader.add_text, REASONING))
            reader.change_kind()
            if found in opens:
                yield from self._section(found)
        if form.bare and self._most:
            first = yield from reader.peek()
            if first and first in form.bare:
                yield from self._section("")
        while True:
            opens = opens if reader.calls < self._most else ()
            found = yield from reader.until(opens, partial(reader.add_text, CONTENT))
            if not found:
                return True
            yield from self._section(found)

    def _section(self, marker: str) -> Truth:
        """The calls from this marker on. Markers without a call are content."""
        form, reader, pending = self._form, self._reader, marker
        last = form.opens[-1] if form.opens else ""
        self._bare = not marker
        since = reader.since = reader.place - len(marker)
        while True:
            failed: str | None = ""
            if marker in ("", last):
                failed = yield from self._call()
                pending = "" if failed is None else pending + failed
            marker = "" if failed else (yield from reader.literal(*form.opens, *form.ends, step=False))
            if not marker or (marker in form.opens and reader.calls >= self._most):
                break
            end = reader.text.index(marker, reader.at) + len(marker)
            if pending or marker not in form.ends:
                since = reader.since = since if pending else reader.place
                pending += reader.text[reader.at : end]
            reader.at = end
        if pending:
            reader.add_text(CONTENT, pending, since)
        reader.since = None
        return not pending

    def _channels(self) -> Truth:
        """The messages of harmony, each with a header."""
        reader, seen = self._reader, set[str]()
        # The prompt has opened the first header, in which a recipient may stand before the channel.
        found = "" if not (yield from reader.literal("to=", step=False)) else _STARTS[0]
        found = found or (yield from reader.until(_STARTS, partial(reader.add_text, CONTENT)))
        while found:
            header = (yield from reader.match(_MESSAGE)) if found in _STARTS else None
            if header is None:
                if found in _STARTS:
                    reader.add_text(CONTENT, found, reader.place - len(found))
                found = yield from reader.until(_STARTS, partial(reader.add_text, CONTENT))
                continue
            recipient, channel = _RECIPIENT.search(header["head"]), _CHANNEL.search(header["head"])
            reader.change_kind()
            called = recipient is not None and reader.calls < self._most
            if recipient is not None and called:
                reader.start(recipient["name"])
                yield from self._value()
            kind = REASONING if not called and channel and channel[0] == "analysis" else CONTENT
            if kind in seen:
                reader.spaces = "\n"
            if not called:
                seen.add(kind)
            found = yield from reader.until(_ENDS, partial(reader.add_text, kind))
        return True

    # ---- calls -----------------------------------------------------------------------------------

    def _call(self) -> NoCall:
        """The calls after a marker."""
        reader = self._reader
        first = yield from reader.peek()
        for notation in self._form.notations:
            failed: str | None = ""
            match notation:
                case formats.Json() if first and first in "[{":
                    failed = yield from self._json()
                case formats.Named() | formats.Xml() if first and first not in "[{":
                    failed = yield from self._headed(notation)
                case formats.Keyed() if first and first in "[{":
                    failed = yield from self._whole(notations.JsonScanner().scan, notations.keyed_calls)
                case formats.Python() if first == "[" or first.isidentifier():
                    failed = yield from self._whole(notations.PythonScanner().scan, _python_or_json)
                case formats.Braces() if (yield from reader.literal("call:", step=False)):
                    failed = yield from self._braces(notation)
            if failed is None or failed:
                return failed
        return ""

    def _is_call_name(self, name: str) -> bool:
        """Whether this is the name of a call. Without a marker any JSON may have a `name`: it is one of the
        functions."""
        return not (self._bare and self._tools) or name in self._tools

    def _are_calls(self, found: notations.Calls | None) -> bool:
        if not all(self._is_call_name(name) for name, _ in found or ()):
            return False
        room = self._most - self._reader.calls
        for name, arguments in (found or [])[:room]:
            self._reader.start(name)
            self._reader.emit(ARGUMENTS, arguments)
        if more := "".join(f"{name}({arguments})\n" for name, arguments in (found or [])[room:]):
            # More calls than the request allows are text. They were read as a whole: their place is its end.
            self._reader.add_text(CONTENT, more, self._reader.place - 1)
        return bool(found)

    def _json(self) -> NoCall:
        """One object, or several in a list or one after the other."""
        reader = self._reader
        listed = yield from reader.literal("[")
        failed = yield from self._object()
        if failed is not None:
            return listed + failed
        while reader.calls < self._most:
            found = yield from reader.another()
            if not found:
                break
            since = reader.since = reader.place
            failed = yield from self._object()
            if failed is not None:
                reader.add_text(CONTENT, failed, since)
                reader.since = None
                return None
        if listed:
            yield from reader.literal("]")
        return None

    def _object(self) -> NoCall:
        reader = self._reader
        while True:
            found = _HEAD_OF_OBJECT.match(reader.text, reader.at, reader.at + MAX_HEAD)
            if found and not self._is_call_name(found["name"]):
                wrong = False
                break
            if found:
                reader.at = found.end()
                reader.start(found["name"])
                yield from self._value()
                yield from self._rest_of_object()
                return None
            seen = reader.text[reader.at : reader.at + MAX_HEAD].lstrip()
            bare = seen.lstrip("{").lstrip()
            wrong = seen[:1] not in ("", "{") or bare[:1] not in ("", '"')
            if wrong or reader.ended or len(seen) >= MAX_HEAD or notations.JsonScanner().scan(seen, 0)[2]:
                break
            yield
        if wrong:
            return ""
        text, _ = yield from reader.collect(notations.JsonScanner().scan)
        return None if self._are_calls(notations.json_calls(text)) else text

    def _rest_of_object(self) -> Truth:
        """Step over further keys and the closing brace, if they are there."""
        reader = self._reader
        if (yield from reader.literal("}")):
            return True
        if not (yield from reader.literal(",", step=False)):
            return False
        while True:
            _, used, done = notations.JsonScanner(1).scan(reader.text[reader.at : reader.at + MAX_HEAD], 0)
            if done:
                reader.at += used
                return True
            if reader.ended or len(reader.text) - reader.at > MAX_HEAD:
                return False
            yield

    def _value(self) -> Truth:
        """Arguments in JSON, as they arrive."""
        reader = self._reader
        first = yield from reader.peek()
        yield from reader.literal(first, step=False)
        reader.at = reader.text.index(first, reader.at) if first else reader.at
        scanner = notations.JsonScanner()
        if first and first in "{[":
            done = False
            while not done:
                part, reader.at, done = scanner.scan(reader.text, reader.at)
                reader.emit(ARGUMENTS, part)
                if reader.ended:
                    return done
                if not done:
                    yield
            return True
        if first == '"':
            text, done = yield from reader.collect(scanner.scan)
            reader.emit(
                ARGUMENTS,
                notations.value_of(text) if not done else notations.arguments_of(notations.unquoted(text)),
            )
            return done
        found = yield from reader.match(_SCALAR, 80)
        reader.emit(ARGUMENTS, "{}" if found is None or found[1] == "null" else notations.value_of(found[1]))
        return found is not None

    def _headed(self, notation: formats.Named | formats.Xml) -> NoCall:
        reader = self._reader
        if isinstance(notation, formats.Xml):
            begins = notation.head_begins
            if begins and not (yield from reader.literal(begins, step=False)):
                return ""
        found = yield from reader.match(re.compile(notation.head))
        if found is None:
            return ""
        reader.start(found["name"])
        if isinstance(notation, formats.Named) or (yield from reader.peek()) == "{":
            yield from self._value()
        else:
            yield from self._arguments(notation, found["name"])
        return None

    def _arguments(self, notation: formats.Xml, function: str) -> Truth:
        """Arguments that have tags of their own, as one JSON object."""
        reader, key_of = self._reader, re.compile(r"\s*" + notation.key)
        separator = "{"
        while (yield from reader.literal(notation.key_begins, step=False)):
            found = yield from reader.match(key_of)
            if found is None:
                break
            reader.emit(ARGUMENTS, f"{separator}{notations.dumps(found['key'])}: ")
            argument = Argument(self._tools.get(function), found["key"])
            if not (yield from self._argument(notation, argument)):
                return False
            separator = ", "
        reader.emit(ARGUMENTS, "}" if separator == ", " else "{}")
        return True

    def _argument(self, notation: formats.Xml, argument: Argument) -> Text:
        """One value: a text as it arrives, any other when it is complete."""
        reader, held, breaks = self._reader, list[str](), ["", ""]
        fresh, string = notation.newlines, argument.streams

        def show(text: str) -> None:
            nonlocal fresh
            if not text:
                return
            if fresh and text[0] == "\n":
                text = text[1:]
            fresh = False
            text = breaks[0] + text
            breaks[0] = "\n" if notation.newlines and text.endswith("\n") else ""
            text = text.removesuffix("\n") if breaks[0] else text
            held.append(text) if not string else reader.emit(ARGUMENTS, notations.escaped(text))

        if string:
            reader.emit(ARGUMENTS, '"')
        end = yield from reader.until((notation.value_ends,), show, NO_LIMIT if string else MAX_HELD)
        if not string and not end and not reader.ended:  # too long to hold: it is a text
            reader.emit(ARGUMENTS, '"' + notations.escaped("".join(held)))
            string = True
            end = yield from reader.until((notation.value_ends,), show)
        if not string:
            reader.emit(ARGUMENTS, argument.read("".join(held)))
        elif end:
            reader.emit(ARGUMENTS, '"')
        return end

    def _whole(self, scan: Scan, calls_in: Callable[[str], notations.Calls | None]) -> NoCall:
        text, _ = yield from self._reader.collect(scan)
        return None if self._are_calls(calls_in(text)) else text

    def _braces(self, notation: formats.Braces) -> NoCall:
        """Everything up to a marker that stands in no text."""
        reader, held, quotes = self._reader, list[str](), 0
        ends = self._form.ends
        while True:
            room = MAX_HELD - sum(map(len, held))
            found = yield from reader.until((notation.quote, *ends), held.append, room)
            if not found or (found in ends and quotes % 2 == 0):
                break
            quotes += found == notation.quote
            held.append(found)
        text = "".join(held)
        return None if self._are_calls(notations.braces_call(text, notation.quote)) else text + found


_ERRORS = "surrogateescape"  # bytes that are no text stay what they are
_END = "<|end|>"  # of a message of harmony


def reasoning_tokens(answer_format: str, ids: Sequence[int], table: Sequence[bytes]) -> int | None:
    """The tokens of `ids` that are reasoning; None if answers of this format have none. `table`: the bytes of
    each token."""
    form, thinking = formats.chosen(answer_format)
    if form is None or not can_reason(form):
        return None
    tokens = [table[i] if i < len(table) else b"" for i in ids]
    data, ends = b"".join(tokens), [*accumulate(map(len, tokens))]
    at = count = past = 0  # byte, tokens, the token after those that were counted
    for text in _reasoning(form, data.decode("utf-8", _ERRORS), thinking=thinking):
        part = text.strip().encode("utf-8", _ERRORS)
        if part and (start := data.find(part, at)) >= 0:
            at = start + len(part)
            first, past = max(bisect_right(ends, start), past), bisect_left(ends, at) + 1
            count += past - first
    return count


def called_functions(answer_format: str, ids: Sequence[int], table: Sequence[bytes]) -> list[str]:
    """The functions that an answer of these tokens calls, each once, in their order. `table`: the bytes of
    each token."""
    form, thinking = formats.chosen(answer_format)
    if form is None:
        return []
    data = b"".join(table[i] if i < len(table) else b"" for i in ids)
    parts = AnswerParser(form, thinking=thinking, tools={}).feed(data.decode("utf-8", "replace"), last=True)
    return [*dict.fromkeys(part.text for part in parts if part.kind == CALL)]


def _reasoning(form: formats.Format, text: str, *, thinking: bool) -> Iterator[str]:
    """The pieces of reasoning. The rest of the answer is not parsed: only harmony reasons again."""
    if form.think is not None and not thinking and not text.lstrip().startswith(form.think[0]):
        return
    parser = AnswerParser(form, thinking=thinking, tools={})
    end = form.think[1] if form.think is not None else _END
    *pieces, last = text.split(end)
    for piece in (*(piece + end for piece in pieces), last, ""):
        for part in parser.feed(piece, last=not piece):
            if part.kind == REASONING:
                yield part.text
            elif not _has_channels(form):
                return


def can_reason(form: formats.Format) -> bool:
    """Whether answers of this format may have reasoning."""
    return form.think is not None or _has_channels(form)


def _has_channels(form: formats.Format) -> bool:
    return isinstance(form.notations[0], formats.Channels)
