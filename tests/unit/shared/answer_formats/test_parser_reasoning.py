"""Which tokens of an answer are reasoning, however its bytes are cut into tokens."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.answer_formats.formats import FORMATS, THINKING
from shared.answer_formats.parser import reasoning_tokens

THOUGHT = 'Zürich 東京 🌧 {"a": 1}\nline'
OTHER = "<|start|>assistant<|channel|>final<|message|>"
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
Pieces = list[tuple[str, bool]]  # text, whether it is reasoning


def counted(name: str, pieces: Pieces, cuts: list[int]) -> tuple[int | None, int]:
    """The count, and the number of tokens with a byte of reasoning."""
    data = "".join(text for text, _ in pieces).encode()
    inside = [thinks for text, thinks in pieces for _ in text.encode()]
    places = sorted({0, len(data), *(cut % len(data) for cut in cuts)})
    spans = [*pairwise(places)]
    table = [data[start:end] for start, end in spans]
    return reasoning_tokens(name, range(len(table)), table), sum(any(inside[a:b]) for a, b in spans)


def thought_of(name: str, text: str, *, opened: bool) -> Pieces:
    begin, end = FORMATS[name].think or ("", "")
    head = [] if opened else [(begin, False)]
    return [*head, ("\n", False), (text, True), ("\n", False), (end, False), ("\n\nYes.", False)]


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.think])
@pytest.mark.parametrize("opened", [False, True])
@given(cuts=st.lists(st.integers(0, 10_000), max_size=80))
def test_each_token_with_reasoning_counts(name: str, opened: bool, cuts: list[int]) -> None:
    found, expected = counted(name + THINKING * opened, thought_of(name, THOUGHT, opened=opened), cuts)
    assert found == expected


@given(cuts=st.lists(st.integers(0, 10_000), max_size=80))
def test_harmony_may_reason_more_than_once(cuts: list[int]) -> None:
    analysis = "<|channel|>analysis<|message|>"
    pieces = [
        (analysis, False), (THOUGHT, True), ("<|end|><|start|>assistant", False),
        (analysis, False), ("And again", True), (f"<|end|>{OTHER}Zürich", False),
    ]  # fmt: skip
    found, expected = counted("harmony", pieces, cuts)
    assert found == expected


def test_reasoning_that_is_cut_or_ends_with_a_call() -> None:
    table = [b"<think>", b"a", b" b", b" \xff", b"</think>", CALL.encode(), b"c"]
    for ids, expected in (([0, 1, 2], 2), ([0, 1, 2, 3, 4, 6], 3), ([6, 0, 1], 0), ([0], 0), ([], 0)):
        assert reasoning_tokens("qwen3", ids, table) == expected, ids
    assert reasoning_tokens("qwen3", [0, 1, 9, 4], table) == 1, "a padded id has no text"
    ends = next(name for name, form in FORMATS.items() if form.calls_end_reasoning and form.think)
    marker = FORMATS[ends].opens[0].encode()
    begin = (FORMATS[ends].think or ("",))[0].encode()
    assert reasoning_tokens(ends, [0, 1, 2], [begin, b"a", marker]) == 1


def test_a_format_without_reasoning_has_no_count() -> None:
    plain = next(n for n, f in FORMATS.items() if not f.think and n != "harmony")
    assert [reasoning_tokens(name, [0], [b"a"]) for name in ("", plain)] == [None, None]
