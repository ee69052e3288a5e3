"""GrammarCompiler compiles grammars in processes that can be killed (grammar_process). Grammars calls it.

    request ──▶ compiled before, by digest? ──▶ done
            ──▶ the tenant's queue ── tenants in turn ──▶ a thread and its process ──▶ read back ──▶ kept

Each thread has its own process. The first grammar starts a thread; more start, up to COMPILERS, while a
tenant waits and all are busy. A tenant has at most one thread, so slow grammars delay only their own tenant.
Refusals are kept, too. The end waits for no thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from services.executor.sampling import grammar_process
from services.executor.sampling.grammar_process import Job, Outcome, Texts, View
from shared.errors import EngineError
from shared.processes import module_command, with_import_path
from shared.vocab.vocabulary import Vocabulary

COMPILERS = 2
COMPILED = 64  # compiled grammars kept
KEPT_BYTES = 256 * 1024 * 1024  # of compiled grammars kept
GRACE_S = 10.0  # beyond the limit of one grammar, for a process that starts or does not answer
MAX_WHY_CHARS = 120  # 256 of them fit into a result
_CONTROL, _BREAKS = frozenset(range(0x20)), frozenset(b"\n\r")
_PLACE = re.compile(r"\[[\d:]+\] \S+:\d+: ")  # XGrammar's time and source line before a message


class GrammarRefusedError(Exception):
    """The grammar itself cannot be compiled: the message is for the client."""


@dataclass(slots=True, eq=False)
class Compilation:
    """One grammar, for all slots with this text. `result` is XGrammar's compiled grammar, or raises
    GrammarRefusedError or EngineError."""

    text: str
    result: Future[Any] = field(default_factory=Future)
    wanted: int = 0  # open slots with it
    took_us: int = 0
    kept_bytes: int = 0


class GrammarCompiler:
    """The compiler of one engine. The device thread calls `request`, `release` and `close`."""

    def __init__(self, load_vocabulary: Callable[[], Vocabulary], vocab: int) -> None:
        self._load_vocabulary = load_vocabulary
        self._vocab = vocab
        self._infos: dict[View, Any] = {}
        self._changed = threading.Condition()  # guards the fields below
        self._cache: OrderedDict[bytes, Compilation] = OrderedDict()
        self._queues: OrderedDict[str, deque[Compilation]] = OrderedDict()  # by tenant, next turn first
        self._busy: set[str] = set()  # tenants with a thread
        self._threads: list[_CompilerThread] = []
        self._closed = False

    def request(self, text: str, tenant: str) -> Compilation:
        """The compilation of a grammar, for one more slot."""
        key = hashlib.blake2b(text.encode(), digest_size=32).digest()
        with self._changed:
            found = self._cache.get(key)
            if found is None or found.result.cancelled():
                found = self._cache[key] = Compilation(text)
                self._queues.setdefault(tenant, deque()).append(found)
                self._start_threads()
            found.wanted += 1
            self._cache.move_to_end(key)
            self._trim()
        return found

    def release(self, compilation: Compilation) -> None:
        """A slot with this grammar has closed. Without slots a compilation does not start."""
        with self._changed:
            compilation.wanted -= 1

    def close(self) -> None:
        """End the processes, and with them the threads. Waits for none."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            threads = list(self._threads)
        for thread in threads:
            thread.end()

    def _start_threads(self) -> None:
        """Wake a thread for a waiting tenant without one, or start one."""
        waits = not self._closed and any(tenant not in self._busy for tenant in self._queues)
        if waits and len(self._threads) == len(self._busy) < COMPILERS:
            self._threads.append(_CompilerThread(self._run))
        self._changed.notify_all()

    def _trim(self) -> None:
        """Drop the least recently used compilations that have ended; slots keep their own reference."""
        kept_bytes = sum(one.kept_bytes for one in self._cache.values())
        for key, one in list(self._cache.items()):
            if len(self._cache) <= COMPILED and kept_bytes <= KEPT_BYTES:
                return
            if one.result.done():
                del self._cache[key]
                kept_bytes -= one.kept_bytes

    def _run(self, thread: _CompilerThread) -> None:
        while (turn := self._next()) is not None:
            tenant, compilation = turn
            began_ns = time.monotonic_ns()
            try:
                found: Any = self._compile(thread, compilation.text)
                compilation.kept_bytes = int(found.memory_size_bytes)
            except Exception as error:  # noqa: BLE001 - a grammar fails its own request only
                found = error
            compilation.took_us = (time.monotonic_ns() - began_ns) // 1000
            with self._changed:
                self._busy.discard(tenant)
                self._changed.notify_all()
            if not isinstance(found, Exception):
                compilation.result.set_result(found)
                continue
            if not isinstance(found, GrammarRefusedError):
                self._forget(compilation)
            compilation.result.set_exception(found)

    def _next(self) -> tuple[str, Compilation] | None:
        """The next compilation in turn, of a tenant without a thread; None at the end."""
        with self._changed:
            while not self._closed:
                tenant = next((tenant for tenant in self._queues if tenant not in self._busy), None)
                if tenant is None:
                    self._changed.wait()
                    continue
                queue = self._queues.pop(tenant)
                compilation = queue.popleft()
                if queue:
                    self._queues[tenant] = queue  # after the other tenants
                if compilation.wanted > 0:
                    self._busy.add(tenant)
                    self._start_threads()
                    return tenant, compilation
                compilation.result.cancel()
        return None

    def _forget(self, compilation: Compilation) -> None:
        with self._changed:
            for key in [key for key, one in self._cache.items() if one is compilation]:
                del self._cache[key]

    def _compile(self, thread: _CompilerThread, text: str) -> Any:
        """Called on a compiler thread. Raises GrammarRefusedError or EngineError."""
        asked = json.loads(text)
        view = View(_without(asked), frozenset(asked.get("markers", ())))
        info = self._info(view)
        outcome = thread.compile(Job(view, text), self._texts)
        if outcome.refused:
            raise GrammarRefusedError(_PLACE.sub("", outcome.refused)[:MAX_WHY_CHARS])
        return xgrammar().CompiledGrammar.deserialize_json(outcome.compiled.decode(), info)

    def _info(self, view: View) -> Any:
        if view not in self._infos:
            kinds, texts = xgrammar(), self._texts(view)
            self._infos[view] = kinds.TokenizerInfo(
                texts.texts, vocab_type=kinds.VocabType.RAW, vocab_size=texts.size, stop_token_ids=texts.stops
            )
        return self._infos[view]

    def _texts(self, view: View) -> Texts:
        vocabulary = self._load_vocabulary()
        texts = vocabulary.bytes_with(view.markers)[: self._vocab]  # weights may have fewer tokens
        if view.without:
            texts = [b"" if view.without.intersection(text) else text for text in texts]
        return Texts(view, texts, self._vocab, [i for i in vocabulary.eos_ids if i < self._vocab])


def _without(asked: dict[str, Any]) -> frozenset[int]:
    """Characters that the answer must not have. JSON has no control characters, but XGrammar allows them in
    strings of bounded length. Reasoning before JSON has line breaks, which XGrammar keeps out of strings."""
    if asked["kind"] == "json":
        return _CONTROL
    return _CONTROL - _BREAKS if asked.get("json") else frozenset()


class _CompilerThread:
    """A thread and the process that compiles for it. A process that died is replaced by the next grammar."""

    def __init__(self, run: Callable[[_CompilerThread], None]) -> None:
        self.process: _Process | None = None
        self._ended = False
        self._changing = threading.Lock()  # guards `process` and `_ended`
        self.thread = threading.Thread(target=run, args=(self,), name="grammars", daemon=True)
        self.thread.start()

    def compile(self, job: Job, texts: Callable[[View], Texts]) -> Outcome:
        """Raises EngineError when the process ends before it answers."""
        with self._changing:
            if self._ended:
                raise EngineError("the executor is stopping")
            if self.process is None or self.process.has_died():
                self.process = _Process()
            process = self.process
        try:
            return process.compile(job, texts)
        except (EOFError, OSError):
            process.kill()
            self.process = None
            raise EngineError("the compiler of grammars has died: ask again") from None

    def end(self) -> None:
        """Kill the process and its compilation, and start no other."""
        with self._changing:
            self._ended = True
            if self.process is not None:
                self.process.kill()


class _Process:
    """The process, and the vocabularies that it has received."""

    def __init__(self) -> None:
        ours, theirs = Pipe()
        command = module_command("services.executor.sampling.grammar_process", str(theirs.fileno()))
        self._process = subprocess.Popen(
            command,
            env=with_import_path({**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}),
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
        )
        theirs.close()
        self._pipe: Connection = ours
        self._has: set[View] = set()
        self.pid = self._process.pid

    def compile(self, job: Job, texts: Callable[[View], Texts]) -> Outcome:
        """Raises EOFError or OSError if the process has ended; a process that does not answer is killed."""
        wanted = [] if job.view in self._has else [texts(job.view)]
        watch = threading.Timer(grammar_process.COMPILE_S + GRACE_S, self._process.kill)
        watch.start()
        try:
            for message in (*wanted, job):
                self._pipe.send(message)
            outcome: Outcome = self._pipe.recv()
        finally:
            watch.cancel()
        self._has.add(job.view)
        return outcome

    def has_died(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill the process and its compilation."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)


def is_installed() -> bool:
    """True if `xgrammar` will find its packages. Imports none of them."""
    return all(map(importlib.util.find_spec, ("xgrammar", "tvm_ffi", "transformers")))


def xgrammar() -> Any:
    """The library XGrammar. Raises GrammarRefusedError if it is not installed."""
    try:
        import xgrammar as library
    except ImportError as error:
        raise GrammarRefusedError(
            f"this executor has no {error.name}: pip install 'headrace[grammar]' where it runs"
        ) from None
    return library
