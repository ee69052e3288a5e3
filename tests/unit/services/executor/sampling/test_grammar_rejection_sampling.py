"""Rows with a grammar are chosen first and asked about after: as if every one had been masked before."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from support.default_model import model_path
from support.structured import grammar_of

from services.executor.sampling.grammar_matchers import CompiledGrammars
from services.executor.sampling.sampler import Sampler
from shared.answer_formats import grammar as answer_grammar
from shared.messages import GrammarFailed, GrammarReady, Sampling, SlotOpen, ints
from shared.vocab.files import ModelFiles
from shared.vocab.vocabulary import Vocabulary, load_vocabulary

PROMPT = [1, 2, 3]
PADDED = 49_160  # a vocabulary as wide as an output layer may be
SLOTS = 100
DRAWS = 10  # of each slot
LETTERS = "abcxyz"
LOGITS = torch.tensor([1.0, 0.5, -1.0, 2.0, 1.0, 0.0])
CONTROL = 5  # a token without a text


def wrong(name: str) -> str:
    """A grammar that no tokenizer of this version sends."""
    source = answer_grammar.whole(None, {"text": name}, thinking=False)
    return answer_grammar.packed(source, frozenset())


FEW = grammar_of({"structured_outputs": {"regex": "[abc]"}})


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return load_vocabulary(ModelFiles("m", model_path()))


@pytest.fixture(scope="module")
def letters(vocabulary: Vocabulary) -> list[int]:
    return [vocabulary.token_bytes.index(letter.encode()) for letter in LETTERS]


@pytest.fixture
def reports() -> queue.SimpleQueue[GrammarReady | GrammarFailed]:
    return queue.SimpleQueue()


@pytest.fixture
def grammars(
    vocabulary: Vocabulary, reports: queue.SimpleQueue[GrammarReady | GrammarFailed]
) -> Iterator[CompiledGrammars]:
    grammars = CompiledGrammars(lambda: vocabulary, PADDED, reports.put)
    yield grammars
    grammars.end()


def opened(slot: int, grammar: str = FEW, temperature: float = 1.0, top_k: int = 0) -> SlotOpen:
    return SlotOpen(
        slot=slot,
        generation=1,
        seq=1,
        prompt_tokens=len(PROMPT),
        grammar=grammar,
        tokens=ints(PROMPT),
        sampling=Sampling(temperature=temperature, top_k=top_k),
        seed=slot,
    )


def sampler_of(grammars: CompiledGrammars, slots: dict[int, SlotOpen]) -> Sampler:
    sampler = Sampler(SLOTS, PADDED, torch.device("cpu"), deterministic=False)
    for slot in slots.values():
        sampler.open(slot)
        grammars.open(slot)
    return sampler


def flat(letters: list[int], rows: int) -> torch.Tensor:
    """Nothing but the letters has a chance."""
    logits = torch.full((rows, PADDED), -torch.inf)
    logits[:, letters] = LOGITS
    return logits


def test_draws_follow_the_softmax_of_what_may_follow(grammars: CompiledGrammars, letters: list[int]) -> None:
    """Also when the record stands still: a token that the grammar took without a record is taken back."""
    sampler = sampler_of(grammars, {slot: opened(slot) for slot in range(SLOTS)})
    logits = flat(letters, SLOTS)
    before = logits.clone()
    drawn: list[int] = []
    for draw in range(DRAWS):
        ids, _, failures = grammars.choose(
            sampler, logits, list(range(SLOTS)), [3 + draw] * SLOTS, lambda _: PROMPT
        )
        assert failures == {}
        drawn += ids.tolist()
    assert torch.equal(logits, before)
    counts = torch.tensor([drawn.count(token) for token in letters], dtype=torch.float64)
    assert counts[3:].sum() == 0
    expected = LOGITS[:3].double().softmax(0) * len(drawn)
    chi_square = ((counts[:3] - expected) ** 2 / expected).sum().item()
    assert chi_square < 13.8  # two degrees of freedom, one in a thousand


def test_token_under_the_grammar_equals_the_free_rows_draw_when_allowed(
    grammars: CompiledGrammars, letters: list[int]
) -> None:
    slots = list(range(SLOTS))
    sampler = sampler_of(grammars, {slot: opened(slot) for slot in slots})
    logits = flat(letters, SLOTS)
    free = sampler.pick(logits, logits, slots, [3] * SLOTS).tolist()
    ids, _, _ = grammars.choose(sampler, logits, slots, [3] * SLOTS, lambda _: PROMPT)
    allowed = [token in letters[:3] for token in free]
    assert 20 < sum(allowed) < 80
    assert all(got == wanted for got, wanted, ok in zip(ids.tolist(), free, allowed, strict=True) if ok)


def test_greedy_rows_filtered_rows_and_free_ones(grammars: CompiledGrammars, letters: list[int]) -> None:
    a, _, _, x, y, _ = letters
    sampler = sampler_of(
        grammars,
        {
            0: opened(0, temperature=0.0),
            1: opened(1, top_k=1),  # of what may follow; of all tokens it would leave x
            2: opened(2, temperature=0.0, grammar=""),
            3: opened(3, temperature=0.0, grammar=grammar_of({"structured_outputs": {"regex": "[y-z]+"}})),
        },
    )
    ids, _, failures = grammars.choose(sampler, flat(letters, 4), [0, 1, 2, 3], [3] * 4, lambda _: PROMPT)
    assert (ids.tolist(), failures) == ([a, a, x, y], {})


def test_a_recorded_token_counts_once_and_another_one_in_its_place(
    grammars: CompiledGrammars, letters: list[int], vocabulary: Vocabulary
) -> None:
    a, b, c, *_ = letters
    eos, *_ = vocabulary.eos_ids
    ab_or_ba = grammar_of({"structured_outputs": {"regex": "ab|ba"}})
    grammars.open(opened(0, ab_or_ba))
    assert grammars.refused([a], [0], [0], lambda _: PROMPT) == ([], {})
    assert grammars.refused([a], [0], [0], lambda _: [*PROMPT, a]) == ([0], {})
    assert grammars.refused([b], [0], [0], lambda _: [*PROMPT, a]) == ([], {})
    assert grammars.refused([eos], [0], [0], lambda _: [*PROMPT, a, b]) == ([], {})
    assert grammars.refused([c], [0], [0], lambda _: [*PROMPT, a, b, eos]) == ([], {})  # past its end
    grammars.open(opened(1, ab_or_ba))
    assert grammars.refused([a], [0], [1], lambda _: PROMPT) == ([], {})
    assert grammars.refused([a], [0], [1], lambda _: [*PROMPT, b]) == ([], {})


def test_tokens_without_a_text_are_refused_without_a_word(
    grammars: CompiledGrammars, capfd: pytest.CaptureFixture[str]
) -> None:
    grammars.open(opened(0))
    assert grammars.refused([CONTROL], [0], [0], lambda _: PROMPT) == ([0], {})
    assert capfd.readouterr() == ("", "")


def test_a_grammar_that_does_not_compile_fails_its_row_alone(
    grammars: CompiledGrammars, letters: list[int]
) -> None:
    broken = wrong("nothing")
    sampler = sampler_of(grammars, {0: opened(0, broken), 1: opened(1, temperature=0.0)})
    ids, host_us, failures = grammars.choose(sampler, flat(letters, 2), [0, 1], [3, 3], lambda _: PROMPT)
    assert list(failures) == [0]
    assert failures[0].startswith("refused: grammar: ")
    assert ids[1] == letters[0]
    assert host_us > 0


def test_a_grammar_that_leads_nowhere_is_at_fault_not_the_engine(
    grammars: CompiledGrammars, letters: list[int]
) -> None:
    nowhere = grammar_of({"structured_outputs": {"regex": r"a[^\s\S]"}})
    slots = {0: opened(0, nowhere), 1: opened(1, temperature=0.0), 2: opened(2, nowhere, top_k=1)}
    sampler = sampler_of(grammars, slots)
    *_, failures = grammars.choose(sampler, flat(letters, 3), [0, 1, 2], [3] * 3, lambda _: PROMPT)
    assert {why.partition(": ")[0] for why in failures.values()} == {"refused"}
    assert sorted(failures) == [0, 2]


def test_end_of_each_compilation_is_reported_once_for_each_waiting_slot(
    grammars: CompiledGrammars, reports: queue.SimpleQueue[GrammarReady | GrammarFailed]
) -> None:
    grammars.open(opened(0))
    first = reports.get(timeout=60)
    assert isinstance(first, GrammarReady)
    assert (first.slot, first.generation) == (0, 1)
    assert first.compile_us > 0
    grammars.open(opened(1))  # known: reported at once
    assert reports.get_nowait() == replace(first, slot=1)
    grammars.open(opened(2, grammar=""))
    grammars.open(opened(3, wrong("nothing")))
    grammars.open(opened(4, wrong("nowhere")))
    grammars.close(4)
    failed = reports.get(timeout=60)
    assert isinstance(failed, GrammarFailed)
    assert failed.slot == 3
    assert failed.message.startswith("grammar: ")
    grammars.open(opened(5, grammar_of({"structured_outputs": {"regex": "[ab]"}})))
    last = reports.get(timeout=60)
    assert (type(last), last.slot) == (GrammarReady, 5)
    assert reports.empty()
