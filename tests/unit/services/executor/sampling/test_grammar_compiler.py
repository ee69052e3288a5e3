"""Grammars are compiled on threads: equal ones once, tenants in turn, refusals kept."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest
from llguidance import LLMatcher
from support.default_model import model_path
from support.structured import grammar_of
from support.text_models import write_hf_folder
from tokenizers import AddedToken

from services.executor.sampling.grammar_matchers import (
    COMPILED,
    Compilation,
    GrammarCompiler,
    GrammarRefusedError,
)
from shared.answer_formats import grammar
from shared.vocab.files import ModelFiles
from shared.vocab.vocabulary import Vocabulary, load_vocabulary

VOCAB = 49_152


def regex(pattern: str) -> str:
    return grammar.packed(grammar.whole(None, {"text": f"/{pattern}/"}, thinking=False), frozenset())


WRONG = grammar.packed(grammar.whole(None, {"text": "nothing"}, thinking=False), frozenset())


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return load_vocabulary(ModelFiles("m", model_path()))


@pytest.fixture
def compiler(vocabulary: Vocabulary) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(lambda: vocabulary, VOCAB)
    yield compiler
    compiler.close()


def result(compilation: Compilation) -> LLMatcher:
    return compilation.result.result(60)


def test_the_compiler_starts_no_thread_before_the_first_grammar(compiler: GrammarCompiler) -> None:
    assert compiler._threads == []


def test_a_grammar_is_compiled_for_weights_with_fewer_tokens_than_the_tokenizer(tmp_path: Path) -> None:
    """A pad token was added, and the weights were not resized."""
    added = (AddedToken("<pad>", special=True), AddedToken("<end>", special=True))
    folder = write_hf_folder(tmp_path / "m", added)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 501]}))
    vocabulary = load_vocabulary(ModelFiles("m", folder))
    compiler = GrammarCompiler(lambda: vocabulary, vocabulary.size - 2)
    assert result(compiler.request(regex("a+"), "t"))
    assert compiler.ends == {2}
    compiler.close()


def test_tenants_take_turns_when_several_wait(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    compile_one = compiler._compile

    def noted(text: str) -> LLMatcher:
        order.append(text)
        return compile_one(text)

    monkeypatch.setattr(compiler, "_compile", noted)
    with compiler._changed:  # nothing begins before all are here
        greedy = [compiler.request(regex(f"a{{{i}}}"), "greedy") for i in range(1, 4)]
        gone = compiler.request(regex("gone"), "modest")
        modest = compiler.request(regex("b"), "modest")
        compiler.release(gone)
    wait([one.result for one in (*greedy, modest)], 60)
    assert order.index(modest.text) <= 2
    assert [text for text in order if text != modest.text] == [one.text for one in greedy]
    assert gone.result.cancelled()
    again = compiler.request(gone.text, "modest")
    assert again is not gone
    result(again)


def test_a_slow_grammar_delays_its_own_tenant_alone(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    compile_one = compiler._compile

    def slowly(text: str) -> LLMatcher:
        if "slow" in text:
            go_on.wait(60)
        return compile_one(text)

    monkeypatch.setattr(compiler, "_compile", slowly)
    slow = [compiler.request(regex(f"slow{i}"), "greedy") for i in range(3)]
    for tenant in ("a", "b"):
        result(compiler.request(regex(tenant), tenant))
    assert [one.result.done() for one in slow] == [False] * 3
    assert len(compiler._threads) == 2
    go_on.set()
    for one in slow:
        result(one)


def test_equal_grammars_are_compiled_once_and_refusals_are_kept(compiler: GrammarCompiler) -> None:
    one, other = compiler.request(regex("a+"), "t"), compiler.request(regex("a+"), "u")
    assert one is other
    result(one)
    wrong = compiler.request(WRONG, "t")
    with pytest.raises(GrammarRefusedError, match=r'grammar: .*unknown name: "nothing"'):
        result(wrong)
    assert compiler.request(wrong.text, "u") is wrong
    for i in range(COMPILED):
        result(compiler.request(regex(f"x{{{i + 1}}}"), "t"))
    assert len(compiler._cache) == COMPILED + 1  # the last one was not compiled yet when it came
    assert compiler.request(regex("a+"), "t") is not one


def test_a_grammar_of_another_version_is_refused_by_its_kind(compiler: GrammarCompiler) -> None:
    older = compiler.request(json.dumps({"kind": "regex", "source": "a"}), "t")
    with pytest.raises(GrammarRefusedError, match="kind 'regex' is of another version"):
        result(older)


def test_a_fault_of_the_compiler_is_forgotten(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without memory proves nothing about the grammar."""

    def fails(text: str) -> LLMatcher:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(compiler, "_compile", fails)
        lost = compiler.request(regex("a+"), "t")
        with pytest.raises(MemoryError):
            result(lost)
    assert result(compiler.request(regex("a+"), "t"))


def test_close_waits_for_no_compilation(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(lambda: vocabulary, VOCAB)
    go_on, begun = threading.Event(), threading.Event()

    def slowly(text: str) -> LLMatcher:
        begun.set()
        go_on.wait(60)
        raise GrammarRefusedError("late")

    monkeypatch.setattr(compiler, "_compile", slowly)
    slow = compiler.request(regex("a"), "t")
    begun.wait(60)
    compiler.close()
    assert not slow.result.done()
    go_on.set()
    (thread,) = compiler._threads
    thread.join(10)
    assert not thread.is_alive()


def test_every_kind_of_structured_output_compiles(compiler: GrammarCompiler) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    for fields in (
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"choice": ["a", "b"]}},
        {"structured_outputs": {"regex": "a/b"}},
        {"grammar": 'root ::= "a" [b-c]*'},
        {"tools": [tool]},
    ):
        assert result(compiler.request(grammar_of(fields), "t"))


def test_a_long_grammar_is_compressed_in_its_message(compiler: GrammarCompiler) -> None:
    names = [f"property_number_{i}" for i in range(2_000)]
    text = grammar_of({"structured_outputs": {"json": {"enum": names}}})
    assert len(text) < len(json.dumps(names)) / 3
    matcher = result(compiler.request(text, "t"))
    vocabulary = compiler._load_vocabulary()
    assert matcher.try_consume_tokens(vocabulary.encode('"property_number_1999"')) > 0
    assert matcher.is_accepting()
