"""`GrammarCompiler` has grammars compiled, one at a time, in a process that can be killed (grammar_process).

    want ──▶ known by its digest? ──▶ there at once
         ──▶ the tenant's queue ── tenants in turn ──▶ the process ──▶ read back here ──▶ kept, by its digest

A tenant whose grammars take long waits behind itself: another one waits for one of them at most. What was
refused is kept, too. Thread and process begin with the first grammar. Nobody waits for either at the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
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
from services.executor.sampling.grammar_process import Job, Outcome, Texts
from shared.errors import EngineError
from shared.vocab.vocabulary import Vocabulary

COMPILED = 64  # grammars kept, with the tables of tokens that they allow
KEPT_BYTES = 256 * 1024 * 1024  # of those
GRACE_S = 10.0  # beyond the limit of one grammar, for a process that begins or does not answer
MAX_WHY_CHARS = 120  # 256 of them fit in a result
_CONTROL = frozenset(range(0x20))
_PLACE = re.compile(r"\[[\d:]+\] \S+:\d+: ")


class GrammarRefusedError(Exception):
    """The grammar itself is why there is none: what it says is for its client."""


@dataclass(slots=True, eq=False)
class Compilation:
    """One grammar, for all slots that have it. Its result is what XGrammar compiled; it raises
    GrammarRefusedError or EngineError."""

    text: str
    result: Future[Any] = field(default_factory=Future)
    wanted: int = 0  # open slots
    took_us: int = 0
    kept_bytes: int = 0


class GrammarCompiler:
    """Of one engine. `want`, `release` and `close` are the device thread's."""

    def __init__(self, load_vocabulary: Callable[[], Vocabulary], vocab: int) -> None:
        self._load_vocabulary = load_vocabulary
        self._vocab = vocab
        self._changed = threading.Condition()  # of the next four
        self._known: OrderedDict[bytes, Compilation] = OrderedDict()
        self._queues: OrderedDict[str, deque[Compilation]] = (
            OrderedDict()
        )  # by tenant, whose turn is next first
        self._thread: threading.Thread | None = None
        self._closed = False
        self._infos: dict[bool, Any] = {}
        self._process: _Process | None = None

    def want(self, text: str, tenant: str) -> Compilation:
        """A grammar for one more slot."""
        key = hashlib.blake2b(text.encode(), digest_size=32).digest()
        with self._changed:
            found = self._known.get(key)
            if found is None or found.result.cancelled():
                found = self._known[key] = Compilation(text)
                self._queues.setdefault(tenant, deque()).append(found)
                self._changed.notify_all()
            found.wanted += 1
            self._known.move_to_end(key)
            self._trim()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
                self._thread.start()
        return found

    def release(self, compilation: Compilation) -> None:
        """A slot has no use for it any more; what nobody wants is not begun."""
        with self._changed:
            compilation.wanted -= 1

    def close(self) -> None:
        """End the process, and the thread after it. Waits for neither."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            process = self._process
        if process is not None:
            process.kill()

    def _trim(self) -> None:
        """Forget the least recently used that are over; who uses one keeps it."""
        kept_bytes = sum(one.kept_bytes for one in self._known.values())
        for key, one in list(self._known.items()):
            if len(self._known) <= COMPILED and kept_bytes <= KEPT_BYTES:
                return
            if one.result.done():
                del self._known[key]
                kept_bytes -= one.kept_bytes

    def _run(self) -> None:
        while (compilation := self._next()) is not None:
            began_ns = time.monotonic_ns()
            try:
                found: Any = self._compile(compilation.text)
            except Exception as error:  # noqa: BLE001 - one request's grammar must not end the others'
                found = error
            compilation.took_us = (time.monotonic_ns() - began_ns) // 1000
            if not isinstance(found, Exception):
                compilation.kept_bytes = int(found.memory_size_bytes)
                compilation.result.set_result(found)
                continue
            if not isinstance(found, GrammarRefusedError):
                self._forget(compilation)
            compilation.result.set_exception(found)

    def _next(self) -> Compilation | None:
        """The next one of the tenant whose turn it is; None at the end."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._queues or self._closed)
                if self._closed:
                    return None
                tenant, queue = self._queues.popitem(last=False)
                compilation = queue.popleft()
                if queue:
                    self._queues[tenant] = queue  # behind the others
                if compilation.wanted > 0:
                    return compilation
                compilation.result.cancel()

    def _forget(self, compilation: Compilation) -> None:
        with self._changed:
            for key in [key for key, one in self._known.items() if one is compilation]:
                del self._known[key]

    def _compile(self, text: str) -> Any:
        """On the thread. Raises GrammarRefusedError, EngineError."""
        no_control = json.loads(text)["kind"] == "json"
        info = self._info(no_control)
        outcome = self._sent(Job(no_control, text))
        if outcome.refused:
            raise GrammarRefusedError(_PLACE.sub("", outcome.refused)[:MAX_WHY_CHARS])
        return xgrammar().CompiledGrammar.deserialize_json(outcome.compiled.decode(), info)

    def _sent(self, job: Job) -> Outcome:
        if self._process is None:
            process = _Process()
            with self._changed:
                self._process = process
                if self._closed:
                    process.kill()
        assert self._process is not None, "begun before"
        try:
            return self._process.compile(job, self._texts)
        except (EOFError, OSError):
            self._process.kill()
            self._process = None
            raise EngineError("the compiler of grammars has died: ask again") from None

    def _info(self, no_control: bool) -> Any:
        if no_control not in self._infos:
            kinds, texts = xgrammar(), self._texts(no_control)
            self._infos[no_control] = kinds.TokenizerInfo(
                texts.texts,
                vocab_type=kinds.VocabType.RAW,
                vocab_size=texts.size,
                stop_token_ids=texts.stops,
            )
        return self._infos[no_control]

    def _texts(self, no_control: bool) -> Texts:
        """JSON never holds a bare control character, which XGrammar allows in strings of bounded length."""
        vocabulary = self._load_vocabulary()
        texts = list(vocabulary.token_bytes)
        if no_control:
            texts = [b"" if _CONTROL.intersection(text) else text for text in texts]
        return Texts(no_control, texts, self._vocab, list(vocabulary.eos_ids))


class _Process:
    """The process, and which vocabularies it has."""

    def __init__(self) -> None:
        ours, theirs = Pipe()
        command = [sys.executable, "-m", "services.executor.sampling.grammar_process", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
        )
        theirs.close()
        self._pipe: Connection = ours
        self._has: set[bool] = set()
        self.pid = self._process.pid

    def compile(self, job: Job, texts: Callable[[bool], Texts]) -> Outcome:
        """Raises EOFError or OSError for a process that has ended: one that does not answer is killed."""
        wanted = [] if job.no_control in self._has else [texts(job.no_control)]
        watch = threading.Timer(grammar_process.COMPILE_S + GRACE_S, self._process.kill)
        watch.start()
        try:
            for message in (*wanted, job):
                self._pipe.send(message)
            outcome: Outcome = self._pipe.recv()
        finally:
            watch.cancel()
        self._has.add(job.no_control)
        return outcome

    def kill(self) -> None:
        """End it now, and what it compiles."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)


def xgrammar() -> Any:
    """The library. Raises GrammarRefusedError where it is not installed."""
    try:
        import xgrammar as library
    except ImportError as error:
        raise GrammarRefusedError(
            f"this executor has no {error.name}: pip install 'headrace[grammar]' where it runs"
        ) from None
    return library
