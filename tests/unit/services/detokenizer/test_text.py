"""Incremental decoding and stop strings, against the decoding of the whole text."""

from __future__ import annotations

import itertools
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.recorded_answers import ANSWERS, TOOLS, Answer, parts_of, read
from support.text_models import trained, write_bpe_gguf, write_sentencepiece_gguf

from services.detokenizer.text import SequenceStream, StopFinder, TextDecoder, TokenGap
from shared.messages import Open, ints
from shared.vocab.files import ModelFiles
from shared.vocab.vocabulary import Vocabulary, load_vocabulary

SIZE = len(trained()[0])
IDS = st.lists(st.integers(0, SIZE + 5), max_size=40)  # a few are outside the vocabulary
CUTS = st.lists(st.integers(0, 40), max_size=6)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), min_size=1, max_size=3, unique=True)


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece"])
def vocabulary(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    path = tmp_path_factory.mktemp("stream") / "m.gguf"
    if request.param == "byte_level":
        write_bpe_gguf(path)
    else:
        pieces = {f"▁p{i}": -1.0 for i in range(SIZE - 259 - 2)} | {"漢": -2.0, "▁": -3.0}
        write_sentencepiece_gguf(path, pieces)
    loaded = load_vocabulary(ModelFiles("m", path))
    assert loaded.size == SIZE
    return loaded


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    path = write_sentencepiece_gguf(tmp_path_factory.mktemp("l") / "l.gguf", {})
    return load_vocabulary(ModelFiles("l", path))  # tokens 3 to 258 are the bytes


def pieces_of(ids: list[int], cuts: list[int]) -> list[list[int]]:
    marks = sorted({0, len(ids), *(cut for cut in cuts if cut <= len(ids))})
    return [ids[a:b] for a, b in itertools.pairwise(marks)]


def stream_of(
    vocabulary: Vocabulary,
    stop: tuple[str, ...] = (),
    include_stop: bool = False,
    stop_ids: tuple[int, ...] = (),
    min_tokens: int = 0,
    answer_format: str = "",
    most_calls: int = 0,
) -> SequenceStream:
    return SequenceStream(
        Open(
            seq=1,
            request="r",
            attempt=1,
            tenant="t",
            model="m",
            inbox="i",
            stop=stop,
            include_stop=include_stop,
            stop_ids=ints(stop_ids),
            min_tokens=min_tokens,
            answer_format=answer_format,
            most_calls=most_calls,
        ),
        vocabulary,
    )


@given(IDS, CUTS)
def test_pieces_concatenate_to_the_whole(vocabulary: Vocabulary, ids: list[int], cuts: list[int]) -> None:
    decoder = TextDecoder(vocabulary)
    texts = [decoder.feed(array("i", piece)) for piece in pieces_of(ids, cuts)]
    whole = vocabulary.decode([i for i in ids if i < vocabulary.size])
    assert "".join([*texts, decoder.finish()]) == whole
    for text in texts:
        text.encode()  # raises on anything that is not valid UTF-8


def test_markers_among_the_control_tokens_have_text(vocabulary: Vocabulary) -> None:
    end = vocabulary.eos_ids[0]
    name = vocabulary.token_text(end)
    word = next(i for i, data in enumerate(vocabulary.token_bytes) if data.isalpha())
    ids = array("i", [end, word])
    shown = TextDecoder(vocabulary, markers=frozenset({name, "none of its tokens"})).feed(ids)
    assert shown == name + vocabulary.token_text(word)
    assert TextDecoder(vocabulary).feed(ids).strip() == vocabulary.token_text(word).strip()
    assert vocabulary.bytes_with(frozenset({"none of its tokens"})) is vocabulary.token_bytes


@given(st.text(alphabet="é漢🎉a", max_size=6))
def test_valid_text_never_shows_replacement_characters(letters: Vocabulary, text: str) -> None:
    decoder = TextDecoder(letters)
    shown = [decoder.feed(array("i", [3 + byte])) for byte in text.encode()]
    assert "\ufffd" not in "".join(shown)
    assert "".join(shown) == text


def first_stop(pieces: list[str], stops: list[str]) -> tuple[int, int, str] | None:
    """By brute force: (pieces read, start, stop) of the stop string complete first in the text."""
    text = "".join(pieces)
    ends = [(at + len(s), at, s) for s in stops for at in range(len(text)) if text.startswith(s, at)]
    if not ends:
        return None
    # Within the piece that completes the first, the earliest end counts.
    end, start, stop = min(ends)
    read = next(n for n in range(1, len(pieces) + 1) if len("".join(pieces[:n])) >= end)
    return read, start, stop


@given(st.lists(st.text(alphabet="ab\nc", max_size=4), max_size=8), STOPS, st.booleans())
def test_stop_strings_against_brute_force(pieces: list[str], stops: list[str], include: bool) -> None:
    finder = StopFinder(tuple(stops), include)
    expected = first_stop(pieces, stops)
    shown, found_at = "", None
    for number, piece in enumerate(pieces, 1):
        text, found = finder.feed(piece)
        shown += text
        if found:
            found_at = number
            break
        # Held back is exactly the longest end that could still become a stop string.
        seen = "".join(pieces[:number])
        held = max((n for s in stops for n in range(len(s)) if seen.endswith(s[:n])), default=0)
        assert shown == seen[: len(seen) - held]
    if expected is None:
        assert found_at is None
        assert shown + finder.finish() == "".join(pieces)
    else:
        read, start, stop = expected
        assert found_at == read
        assert shown == "".join(pieces)[: start + (len(stop) if include else 0)]


CALLED = '<tool_call>\n{"name": "f", "arguments": {"a": "STOP"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("form", "calls", "stop", "text", "shown"),
    [
        ("qwen3/thinking", 0, "STOP", "a STOP</think>\n\nb STOP c", "a STOP</think>\n\nb "),
        ("qwen3", 0, "STOP", "<think>STOP</think>b STOP c", "<think>STOP</think>b "),
        ("qwen3", 0, "STOP", "b STOP <think>", "b "),
        ("qwen3/thinking", 0, "\n", "a\nb</think>\n\nc d\ne", "a\nb</think>\n\nc d"),
        ("qwen3/thinking", 0, "</think>", "a</think>b", None),
        ("qwen3/thinking", 0, "kb", "a</think>b", None),
        ("qwen3/thinking", 0, "STOP", "never STOP", None),
        ("hermes", 2, "STOP", f"b {CALLED} c STOP", f"b {CALLED} c "),
        ("hermes", 0, "STOP", f"b {CALLED} c STOP", f"b {CALLED[: CALLED.index('STOP')]}"),
        ("hermes", 1, "STOP", f"{CALLED}\n{CALLED}", f"{CALLED}\n{CALLED[: CALLED.index('STOP')]}"),
        ("hermes", 2, "name", f"b {CALLED}", None),
        ("hermes", 2, "<tool", f"b {CALLED}", None),
        ("hermes", 2, "<", f"a < b {CALLED}", "a "),
        ("hermes", 2, "<", "a <", "a "),
        ("hermes", 2, "\n\n", f"a\n\n{CALLED}", "a"),
        ("hermes", 2, "ac", f"a{CALLED}c", None),
        ("hermes", 2, "}", "<tool_call> is {no} call", "<tool_call> is {no"),
        ("llama3", 2, "4", '{"answer": 4}', '{"answer": '),
        ("llama3", 2, "f", '{"name": "f", "parameters": {}}; f', '{"name": "f", "parameters": {}}; '),
        (
            "harmony", 2, "STOP",
            "<|channel|>analysis<|message|>STOP<|end|><|start|>assistant<|channel|>final<|message|>a STOP b",
            "<|channel|>analysis<|message|>STOP<|end|><|start|>assistant<|channel|>final<|message|>a ",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_counts_in_the_content_alone(
    letters: Vocabulary, form: str, calls: int, stop: str, text: str, shown: str | None, include: bool
) -> None:
    expected = text if shown is None else shown + stop * include
    ids = array("i", [3 + byte for byte in text.encode()])
    ends = set()
    for pieces in ([ids], [ids[i : i + 1] for i in range(len(ids))]):  # as after a failover, and as they come
        stream = stream_of(letters, (stop,), include, answer_format=form, most_calls=calls)
        for piece in pieces:
            if stream.stop_index is None:
                stream.add_tokens(stream.taken, piece)
        tokens = stream.close(len(ids), "length")
        assert stream.drain().text == expected
        assert (stream.reason, stream.stop) == (("length", "") if shown is None else ("stop", stop))
        ends.add(tokens)
    assert len(ends) == 1


ANSWERED = [answer for answer in ANSWERS if answer.has_text or answer.thinks]
NEAR_STOPS = st.sampled_from(
    ["I", "t.", "look", "name", "<", "call", "{", "user", "T", "get_", "zone", ":", "E"]
)


@given(
    st.sampled_from(ANSWERED),
    st.sampled_from([0, 2]),
    st.lists(NEAR_STOPS, min_size=1, max_size=2, unique=True),
    CUTS,
)
def test_stop_strings_in_answers_against_the_content_of_the_whole(
    letters: Vocabulary, answer: Answer, calls: int, stops: list[str], cuts: list[int]
) -> None:
    tools = TOOLS if calls else None
    text = f"{answer.text}\nThis is it."
    parts = [
        part for parts in parts_of(answer.form, [text], thinking=answer.opened, tools=tools) for part in parts
    ]
    contents = [
        "".join(part.text for part in group)
        for kind, group in itertools.groupby(parts, lambda part: part.kind)
        if kind == "content"
    ]
    found = [(min(ends)[1], n) for n, tail in enumerate(contents) if (ends := stops_in(tail, stops))]
    form = answer.form + "/thinking" * answer.opened
    stream = stream_of(letters, tuple(stops), answer_format=form, most_calls=calls)
    ids = [3 + byte for byte in text.encode()]
    shown = ""
    for piece in pieces_of(ids, [cut * 9 for cut in cuts]):
        if stream.stop_index is None:
            stream.add_tokens(stream.taken, array("i", piece))
            shown += stream.drain().text
    stream.close(len(ids), "length")
    shown += stream.drain().text
    assert text.startswith(shown)
    tail = read(answer.form, shown, thinking=answer.opened, tools=tools).content.split()
    if found:
        start, n = found[0]
        assert tail == "".join([*contents[:n], contents[n][:start]]).split()
        assert stream.reason == "stop"
    else:
        assert (shown, stream.reason) == (text, "length")


def stops_in(text: str, stops: list[str]) -> list[tuple[int, int]]:
    """The end and start of the first of each."""
    return [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]


def test_reasoning_is_not_held_back(letters: Vocabulary) -> None:
    stream = stream_of(letters, ("STOP",), answer_format="qwen3/thinking")
    shown = []
    for byte in b"a ST</think>b STO":
        stream.add_tokens(stream.taken, array("i", [3 + byte]))
        shown.append(stream.drain().text)
    assert shown == [*"a ST", *[""] * 7, "</think>", "b", " ", "", "", ""]


def test_a_stop_string_in_content_begins_after_the_least_tokens(letters: Vocabulary) -> None:
    text = "a</think>STOP bSTOP"
    for least, shown in ((9, "a</think>"), (10, "a</think>STOP b"), (16, text)):
        stream = stream_of(letters, ("STOP",), min_tokens=least, answer_format="qwen3/thinking")
        stream.add_tokens(0, array("i", [3 + byte for byte in text.encode()]))
        stream.close(len(text), "length")
        assert stream.drain().text == shown


def test_stop_index_is_the_token_that_completes_it(letters: Vocabulary) -> None:
    stream = stream_of(letters, stop=("STOP",))
    ids = array("i", [3 + byte for byte in b"a STOP b"])
    assert stream.add_tokens(0, ids)
    assert (stream.stop_index, stream.taken) == (6, 6)
    assert not stream.add_tokens(8, ids)  # after a stop string: dropped
    delta = stream.drain()
    assert (delta.first, delta.count, delta.text) == (0, 6, "a ")
    assert stream.close(8, "length") == 6
    assert stream.reason == "stop"


@pytest.mark.parametrize(("least", "stops_at"), [(0, 4), (2, 4), (3, 8), (6, 8), (7, None)])
def test_a_stop_string_begins_after_min_tokens(letters: Vocabulary, least: int, stops_at: int | None) -> None:
    stream = stream_of(letters, stop=("XY",), min_tokens=least)
    stream.add_tokens(0, array("i", [3 + byte for byte in b"a XY.bXYc"]))
    assert stream.stop_index == stops_at
    stream.close(9, "length")
    assert stream.drain().text == {4: "a ", 8: "a XY.b", None: "a XY.bXYc"}[stops_at]


@pytest.mark.parametrize("shape", ["chat", "completion"])
def test_the_space_of_the_first_word(tmp_path: Path, shape: str) -> None:
    """SentencePiece has one there: an answer begins without it, a completion goes on with it."""
    path = write_sentencepiece_gguf(tmp_path / "m.gguf", {"▁and": -1.0, "▁so": -2.0})
    vocabulary = load_vocabulary(ModelFiles("m", path))
    opened = Open(seq=1, request="r", attempt=1, tenant="t", model="m", inbox="i", format=shape)
    stream = SequenceStream(opened, vocabulary)
    stream.add_tokens(0, array("i", [259, 260]))
    assert stream.drain().text == (" and so" if shape == "completion" else "and so")


@pytest.mark.parametrize("stop", [(), ("zz", "!")])
@pytest.mark.parametrize("include", [False, True])
def test_stop_token_has_no_text_unless_requested(
    letters: Vocabulary, stop: tuple[str, ...], include: bool
) -> None:
    """It counts as a token, and as one of a prefix that is sent again; nor does it complete a stop string."""
    for cuts in ([], [1], [1, 2]):
        stream = stream_of(letters, stop, include_stop=include, stop_ids=(3 + ord("!"),))
        ids = [3 + byte for byte in b"ab!"]
        at = 0
        for piece in pieces_of(ids, cuts):
            stream.add_tokens(at, array("i", piece))
            at += len(piece)
        assert stream.close(3, "stop") == 3
        assert stream.drain().text == ("ab!" if include else "ab")
        assert stream.reason == "stop"
        assert list(stream.ids) == ids


def test_an_earlier_close_wins_over_the_stop_string(letters: Vocabulary) -> None:
    stream = stream_of(letters, stop=("b",), include_stop=True)
    assert stream.add_tokens(0, array("i", [3 + byte for byte in b"aab"]))
    assert stream.drain().text == "aab"
    assert stream.close(2, "length") == 2
    assert stream.reason == "length"


@given(IDS, CUTS, st.integers(0, 5))
def test_duplicates_change_nothing(
    vocabulary: Vocabulary, ids: list[int], cuts: list[int], back: int
) -> None:
    stream = stream_of(vocabulary)
    at = 0
    for piece in pieces_of(ids, cuts):
        first = max(0, at - back)
        stream.add_tokens(first, array("i", ids[first : at + len(piece)]))
        stream.add_tokens(first, array("i", ids[first:at]))
        at += len(piece)
    assert stream.close(len(ids), "stop") == len(ids)
    delta = stream.drain()
    assert (delta.first, delta.count) == (0, len(ids))
    assert delta.text == vocabulary.decode([i for i in ids if i < vocabulary.size])


def test_gaps_are_errors(letters: Vocabulary) -> None:
    stream = stream_of(letters)
    stream.add_tokens(0, array("i", [70]))
    with pytest.raises(TokenGap, match="tokens 1 to 2 of the answer were lost"):
        stream.add_tokens(3, array("i", [70]))
    with pytest.raises(TokenGap, match="tokens 1 to 4"):
        stream.close(5, "stop")


def test_text_held_back_comes_out_at_the_end(letters: Vocabulary) -> None:
    stream = stream_of(letters, stop=("ST\ufffd",))
    stream.add_tokens(0, array("i", [3 + byte for byte in b"xS"]))
    assert stream.drain().text == "x"
    stream.add_tokens(2, array("i", [3 + 0xE6]))
    assert not stream.has_text
    assert stream.close(3, "length") == 3
    assert stream.drain().text == "S\ufffd"
