"""Grammars are compiled in a process that can be killed: what one does is no other's matter."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest
from support.default_model import model_path
from support.structured import grammar_of
from support.text_models import write_hf_folder
from tokenizers import AddedToken

from services.executor.sampling import grammar_compiler, grammar_process
from services.executor.sampling.grammar_compiler import (
    COMPILED,
    Compilation,
    GrammarCompiler,
    GrammarRefusedError,
)
from shared.errors import EngineError
from shared.vocab.files import ModelFiles
from shared.vocab.vocabulary import Vocabulary, load_vocabulary

VOCAB = 49_152
POPEN = subprocess.Popen
# 26 times up to 900 letters but one, and that one: 21 to 52 s and 2.7 GB, and it cannot be stopped
SLOW = "".join(f"[^{chr(97 + (i + 1) % 26)}]{{0,900}}{chr(97 + (i + 1) % 26)}" for i in range(26))


def regex(pattern: str) -> str:
    return json.dumps({"kind": "regex", "source": pattern})


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return load_vocabulary(ModelFiles("m", model_path()))


@pytest.fixture
def compiler(vocabulary: Vocabulary) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(lambda: vocabulary, VOCAB)
    yield compiler
    compiler.close()


def result(compilation: Compilation) -> object:
    return compilation.result.result(60)


def process_of(compiler: GrammarCompiler) -> int:
    process = compiler._threads[0].process
    assert process is not None
    return process.pid


def test_nothing_runs_before_the_first_grammar(compiler: GrammarCompiler) -> None:
    assert compiler._threads == []


def test_weights_with_fewer_tokens_than_the_tokenizer(tmp_path: Path) -> None:
    """A pad token was added, and the weights were not resized."""
    added = (AddedToken("<pad>", special=True), AddedToken("<end>", special=True))
    folder = write_hf_folder(tmp_path / "m", added)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 501]}))
    vocabulary = load_vocabulary(ModelFiles("m", folder))
    compiler = GrammarCompiler(lambda: vocabulary, vocabulary.size - 2)
    result(compiler.request(regex("a+"), "t"))
    compiler.close()


def test_a_grammar_over_its_time_or_memory_is_refused_and_the_next_one_is_not(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = compiler.request(regex("a+"), "t")
    result(started)
    before = process_of(compiler)
    limited = limits_of(compiler, monkeypatch, seconds=1.0)
    with pytest.raises(GrammarRefusedError, match="takes over 1 s to compile"):
        result(limited.request(regex(SLOW), "t"))
    result(limited.request(regex("b+"), "t"))
    limited.close()
    limited = limits_of(compiler, monkeypatch, megabytes=16)
    with pytest.raises(GrammarRefusedError, match="takes over 16 MiB to compile"):
        result(limited.request(regex("[^a]{0,100}a" * 10), "t"))
    result(limited.request(regex("b+"), "t"))
    limited.close()
    result(compiler.request(regex("c+"), "t"))
    assert process_of(compiler) == before


def limits_of(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, seconds: float = 20.0, megabytes: int = 1024
) -> GrammarCompiler:
    """A compiler whose process has other limits."""
    code = (
        "from services.executor.sampling import grammar_process as p; "
        f"p.COMPILE_S, p.MEMORY_BYTES = {seconds}, {megabytes << 20}; p.main()"
    )

    def with_limits(command: list[str], **more: object) -> subprocess.Popen[bytes]:
        return POPEN([sys.executable, "-c", code, command[-1]], **more)  # type: ignore[call-overload, no-any-return]  # passed on

    monkeypatch.setattr(grammar_compiler.subprocess, "Popen", with_limits)
    return GrammarCompiler(compiler._load_vocabulary, VOCAB)


def test_tenants_are_compiled_for_in_turn(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    compile_one = compiler._compile

    def noted(lane: grammar_compiler._CompilerThread, text: str) -> object:
        order.append(text)
        return compile_one(lane, text)

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


def test_one_that_takes_long_keeps_its_own_tenant_waiting_and_no_other(compiler: GrammarCompiler) -> None:
    slow = [compiler.request(regex(SLOW + "x" * i), "greedy") for i in range(3)]
    for tenant in ("a", "b"):
        result(compiler.request(regex(tenant), tenant))
    assert [one.result.done() for one in slow] == [False] * 3
    assert len(compiler._threads) == 2


def test_equal_grammars_are_compiled_once_and_what_was_refused_is_kept(compiler: GrammarCompiler) -> None:
    one, other = compiler.request(regex("a+"), "t"), compiler.request(regex("a+"), "u")
    assert one is other
    result(one)
    wrong = compiler.request('{"kind": "ebnf", "source": "root ::= nothing"}', "t")
    with pytest.raises(GrammarRefusedError, match=r'grammar: .*Rule "nothing"'):
        result(wrong)
    assert compiler.request(wrong.text, "u") is wrong
    for i in range(COMPILED):
        result(compiler.request(regex(f"x{{{i + 1}}}"), "t"))
    assert len(compiler._cache) == COMPILED
    assert compiler.request(regex("a+"), "t") is not one


def test_a_process_that_dies_while_it_compiles_costs_that_grammar(compiler: GrammarCompiler) -> None:
    result(compiler.request(regex("a+"), "t"))
    first = process_of(compiler)
    lost = compiler.request(regex(SLOW), "t")
    while not children(first):
        assert not lost.result.done()
    os.kill(first, signal.SIGKILL)
    with pytest.raises(EngineError, match="has died: ask again"):
        result(lost)
    assert compiler.request(lost.text, "t") is not lost
    result(compiler.request(regex("b+"), "u"))


def test_a_process_that_died_between_two_grammars_is_replaced(compiler: GrammarCompiler) -> None:
    result(compiler.request(regex("a+"), "t"))
    first = process_of(compiler)
    os.kill(first, signal.SIGKILL)
    while not gone(first):
        pass
    result(compiler.request(regex("b+"), "t"))
    assert process_of(compiler) != first


def test_a_process_that_hangs_is_killed(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    result(compiler.request(regex("a+"), "t"))
    monkeypatch.setattr(grammar_process, "COMPILE_S", 0.0)
    monkeypatch.setattr(grammar_compiler, "GRACE_S", 0.1)
    os.kill(process_of(compiler), signal.SIGSTOP)
    with pytest.raises(EngineError, match="has died: ask again"):
        result(compiler.request(regex("b+"), "t"))
    monkeypatch.undo()
    result(compiler.request(regex("b+"), "t"))


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


EXECUTOR = f"""
import sys, threading
sys.path.insert(0, "tests")
from services.executor.sampling.grammar_compiler import GrammarCompiler
from types import SimpleNamespace
table = [bytes([i]) for i in range(256)] * 100
words = SimpleNamespace(bytes_with=lambda markers: table, eos_ids=(0,))
compiler = GrammarCompiler(lambda: words, 25600)
compiler.request('{{"kind": "regex", "source": "a"}}', "t").result.result()
compiler.request('{{"kind": "regex", "source": "{SLOW * 2}"}}', "t")
print(compiler._threads[0].process.pid, flush=True)
threading.Event().wait()
"""


def test_it_ends_with_its_executor_and_what_it_compiles_too() -> None:
    executor = subprocess.Popen([sys.executable, "-c", EXECUTOR], stdout=subprocess.PIPE)
    assert executor.stdout is not None
    process = int(executor.stdout.readline())
    maps = Path(f"/proc/{process}/maps").read_text()
    while not (forks := children(process)):
        assert executor.poll() is None
    executor.kill()
    executor.wait()
    while not all(map(gone, [process, *forks])):
        pass
    assert "libxgrammar" in maps
    assert "libtorch" not in maps


def test_the_end_waits_for_no_compilation(vocabulary: Vocabulary) -> None:
    compiler = GrammarCompiler(lambda: vocabulary, VOCAB)
    result(compiler.request(regex("a"), "t"))
    process = process_of(compiler)
    slow = compiler.request(regex(SLOW), "t")
    compiler.close()
    assert gone(process)
    (lane,) = compiler._threads
    lane.thread.join(10)
    assert not lane.thread.is_alive()
    assert not slow.result.running()


def test_every_kind_comes_back_as_it_was_compiled(compiler: GrammarCompiler) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    for fields in (
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"choice": ["a", "b"]}},
        {"tools": [tool]},
    ):
        assert result(compiler.request(grammar_of(fields), "t"))
