"""Counts the tokens of an answer that are reasoning. Pure.

The parser (parser.py) finds the reasoning in the text. A token with any byte of it counts, so the count is
exact but for the token at each border, which may have other text, too. Markers, and white space beside them,
are no reasoning.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from shared.answer_formats.formats import Channels, Format, chosen
from shared.answer_formats.parser import AnswerParser
from shared.answer_formats.reader import REASONING

_ERRORS = "surrogateescape"  # bytes that are no text stay what they are
_END = "<|end|>"  # of a message of harmony


def reasoning_tokens(answer_format: str, ids: Sequence[int], table: Sequence[bytes]) -> int | None:
    """The tokens of `ids` that are reasoning; None if answers of this format have none. `table`: the bytes of
    each token."""
    form, thinking = chosen(answer_format)
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


def _reasoning(form: Format, text: str, *, thinking: bool) -> Iterator[str]:
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
            elif not _channels(form):
                return


def can_reason(form: Format) -> bool:
    """Whether answers of this format may have reasoning."""
    return form.think is not None or _channels(form)


def _channels(form: Format) -> bool:
    return isinstance(form.notations[0], Channels)
