"""This process compiles grammars, because only the end of a process stops a compilation.

    executor ── Texts, Job ──▶ this process ── a fork for each job ──▶ compile, serialize
             ◀── Outcome ────               ◀── Outcome ────────────── or death at a limit

It keeps XGrammar's form of the vocabulary, which each fork shares, so a job that dies costs the next one no
time. It ends with the executor, and a job ends with it. XGrammar is loaded without the parts that import
torch: 60 MB and 1 s instead of 300 MB and 6 s.

`python -m services.executor.sampling.grammar_process FD`, started by grammar_compiler.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import pickle
import resource
import select
import signal
import sys
import time
import types
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

COMPILE_S = 20.0  # limit for one grammar
MEMORY_BYTES = 1024 * 1024 * 1024  # of one compilation, beyond the process's own
MAX_COMPILED_BYTES = 64 * 1024 * 1024  # serialized
CACHE_BYTES = 64 * 1024 * 1024  # XGrammar's cache of the parts of one grammar
_PARENT_S = 2.0  # between two checks that the executor lives
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class View:
    """How grammars see a vocabulary: tokens with the characters `without` have no text, control tokens among
    `markers` have one."""

    without: frozenset[int] = frozenset()
    markers: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Texts:
    """The texts of a vocabulary of `size` tokens, as one `view` of it has them."""

    view: View
    texts: list[bytes]
    size: int
    stops: list[int]


@dataclass(frozen=True, slots=True)
class Job:
    """A grammar to compile: {"kind": …, "source": …}, see services.tokenizer.structured_output."""

    view: View
    text: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """The grammar as XGrammar serializes it, or why the grammar is refused."""

    compiled: bytes = b""
    refused: str = ""


def compiled(compiler: Any, text: str) -> Any:
    """The grammar `text` of a Job, compiled by XGrammar. Raises XGrammar's errors."""
    asked = json.loads(text)
    if asked["kind"] == "structural_tag":
        return compiler.compile_structural_tag(json.loads(asked["source"]))
    if asked["kind"] == "json":
        return compiler.compile_json_schema(asked["source"], any_whitespace=False)
    compile_one = compiler.compile_regex if asked["kind"] == "regex" else compiler.compile_grammar
    return compile_one(asked["source"])


def attempt(compiler: Any, text: str, executor: Connection) -> Outcome:
    """Compile in a fork, within the limits. Raises EOFError once the executor has ended."""
    read_end, write_end = os.pipe()
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        _compile_here(compiler, text, write_end, parent)
    os.close(write_end)
    found = bytearray()
    try:
        in_time = _collect(read_end, executor, found)
    finally:
        os.kill(pid, signal.SIGKILL)  # it has sent everything, or its time is over
        _, status = os.waitpid(pid, 0)
        os.close(read_end)
    if not in_time or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
        return Outcome(refused=f"the grammar takes over {COMPILE_S:g} s to compile: simplify it")
    try:
        outcome: Outcome = pickle.loads(found)
    except Exception:  # noqa: BLE001 - the fork died, by a signal or for lack of memory
        return Outcome(refused="the grammar broke its compiler: simplify it")
    return outcome


def _collect(read_end: int, executor: Connection, found: bytearray) -> bool:
    """Read the fork's output into `found` until it ends. False when its time is over before."""
    until_s = time.monotonic() + COMPILE_S
    while (left_s := until_s - time.monotonic()) > 0:
        both = [read_end, executor.fileno()]
        ready, _, _ = select.select(both, [], [], min(left_s, _PARENT_S))
        if executor.fileno() in ready or _parent_gone():
            raise EOFError  # the executor sends nothing before the answer: it has ended
        if ready:
            data = os.read(read_end, _CHUNK)
            if not data:
                return True
            found += data
    return False


def _parent_gone() -> bool:
    return os.getppid() != _PARENT


def _compile_here(compiler: Any, text: str, write_end: int, parent: int) -> NoReturn:
    """Runs in the fork of `parent`."""
    try:
        _die_with(parent)
        seconds = int(COMPILE_S) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        most = _address_space() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        with os.fdopen(write_end, "wb") as pipe:
            pickle.dump(_outcome(compiler, text), pipe)
    finally:
        os._exit(0)


def _outcome(compiler: Any, text: str) -> Outcome:
    try:
        data = compiled(compiler, text).serialize_json().encode()
    except MemoryError:
        return Outcome(refused=_too_large())
    except Exception as error:  # noqa: BLE001 - XGrammar raises many types
        return Outcome(refused=_too_large() if "bad_alloc" in str(error) else f"grammar: {line(error)}")
    return Outcome(data) if len(data) <= MAX_COMPILED_BYTES else Outcome(refused=_too_large())


def _too_large() -> str:
    return f"the grammar takes over {MEMORY_BYTES >> 20} MiB to compile: simplify it"


def line(error: Exception) -> str:
    """The last line of an error's text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before prctl
        os._exit(0)


def _address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _compiler(texts: Texts) -> Any:
    compiler = importlib.import_module("xgrammar.compiler")
    tokens = importlib.import_module("xgrammar.tokenizer_info")
    info = tokens.TokenizerInfo(
        texts.texts, vocab_type=tokens.VocabType.RAW, vocab_size=texts.size, stop_token_ids=texts.stops
    )
    return compiler.GrammarCompiler(info, max_threads=1, cache_limit_bytes=CACHE_BYTES)


def _without_torch() -> None:
    """Make `import xgrammar.compiler` load only that module: the whole package imports torch for masks and
    transformers for its tokenizers."""
    spec = importlib.util.find_spec("xgrammar")
    assert spec is not None, "the executor has imported it before"
    package = types.ModuleType("xgrammar")
    package.__path__ = list(spec.submodule_search_locations or ())
    tokenizers: Any = types.ModuleType("transformers")
    tokenizers.PreTrainedTokenizerBase = tokenizers.PreTrainedTokenizerFast = type(None)
    absent: Any = None  # an import fails as if it were not installed
    sys.modules.update(xgrammar=package, transformers=tokenizers, torch=absent)
    importlib.import_module("xgrammar.load_binding")


_PARENT = os.getppid()


def main() -> None:
    """Compile the executor's grammars until the executor ends."""
    executor = Connection(int(sys.argv[1]))
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal's signals reach the whole group
        signal.signal(number, signal.SIG_IGN)
    _without_torch()
    compilers: dict[View, Any] = {}
    try:
        while not _parent_gone():
            if not executor.poll(_PARENT_S):
                continue
            asked = executor.recv()
            if isinstance(asked, Texts):
                compilers[asked.view] = _compiler(asked)
            else:
                executor.send(attempt(compilers[asked.view], asked.text, executor))
    except (EOFError, OSError):
        return  # the executor has ended


if __name__ == "__main__":
    # Not as __main__: pickled messages name this module's types.
    importlib.import_module("services.executor.sampling.grammar_process").main()
