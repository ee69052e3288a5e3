"""Measures steps with drafts: their time, the gain at a set rate of acceptance, whether ids stay the same.

Random weights accept no draft, so drafts are forced. `Forced` accepts each at a set rate, though the
model chooses other tokens; `Oracle` proposes what the model has chosen without drafts, some of it wrong. Both
replace a launch of the graphs that are captured while they are in place.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import random
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from kernels.drafts import gpu as drafts_gpu
from kernels.elementwise.gpu import NO_DRAFT, DraftState
from kernels.sampling.gpu import Choices
from loadtest.driver import Driver
from loadtest.gpu.engine import CONTEXT, STEPS, WARM_STEPS
from loadtest.gpu.rig import Built, end, llama_8b
from services.executor.checkpoint.loader import TorchOptions
from services.executor.cuda import graph_runner, input_batch
from services.executor.cuda.engine import build
from services.executor.engine import Backend, Pending
from shared.config import load
from shared.messages import AT_DEVICE, FROM_DEVICE, FROM_HOST, Sampling
from shared.vocab.files import DEFAULT_MODEL, resolve
from shared.vocab.vocabulary import load_vocabulary

ROWS, COUNTS, RATES = (1, 8, 32, 64), (1, 3, 7), (0.6, 0.3)
# An H200, an 8B model at 1k context and three drafts, predicted from products alone: a step's time over that
# of one without drafts, and the gain at RATES.
PREDICTED = {1: (1.00, 2.17, 1.41), 8: (1.04, 2.09, 1.36), 32: (1.11, 1.96, 1.27), 64: (1.33, 1.64, 1.07)}
SMALL: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 4096, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
}  # fmt: skip
SEQUENCES, PROMPT, TOKENS = 16, 100, 96  # of the runs whose ids are compared
WISHES = (
    Sampling(temperature=0.0), Sampling(temperature=0.8), Sampling(temperature=0.7, top_k=40, top_p=0.9),
    Sampling(temperature=1.0, min_p=0.05),
)  # fmt: skip
_WORDS = (
    "river", "stone", "seven", "green", "window", "letter", "copper", "garden", "silent", "north", "paper",
    "morning", "blue", "engine", "harbour", "winter", "table", "yellow", "signal", "forest",
)  # fmt: skip


class Forced:
    """Every row has all its drafts, and each is accepted at `rate`."""

    def __init__(self) -> None:
        self.rate = torch.zeros((), device="cuda")
        self._coins, self._at = torch.rand(1 << 16, device="cuda"), torch.zeros((), dtype=torch.int64).cuda()

    def propose(self, slots: Tensor, queries: int, done: Tensor, state: DraftState) -> None:
        """In place of kernels.drafts.gpu.propose."""
        state.ids.fill_(1)

    def accept(
        self,
        samples: tuple[Tensor, Tensor],
        chosen: Tensor,
        token_ids: Tensor,
        choices: Choices,
        answer: Tensor,
    ) -> None:
        """In place of kernels.drafts.gpu.accept: makes drafts right or wrong first."""
        queries, rows = len(answer) - drafts_gpu.COLUMNS, answer.shape[1]
        right = chosen[0, : rows * queries].view(rows, queries)[:, :-1]
        given, count = token_ids.view(rows, queries)[:, 1:], rows * (queries - 1)
        coins = self._coins[(self._at + torch.arange(count, device="cuda")) % len(self._coins)]
        self._at.add_(count)
        some = torch.where(coins.view_as(given) < self.rate, right, right + 1)
        given.copy_(torch.where(given >= 0, some, NO_DRAFT))
        drafts_gpu.accept(samples, chosen, token_ids, choices, answer)


class Oracle:
    """Drafts are the tokens of `truth`, three in ten of them wrong."""

    def __init__(self, slots: int, width: int) -> None:
        self.truth = torch.full((slots + 1, width), -1, dtype=torch.int32, device="cuda")
        self._coins, self._at = torch.rand(1 << 16, device="cuda"), torch.zeros((), dtype=torch.int64).cuda()

    def propose(self, slots: Tensor, queries: int, done: Tensor, state: DraftState) -> None:
        """In place of kernels.drafts.gpu.propose."""
        ahead = state.places.long()[:, None] + 1 + torch.arange(state.ids.shape[1], device="cuda")
        ids = self.truth.gather(1, ahead.clamp(max=self.truth.shape[1] - 1))
        coins = self._coins[(self._at + torch.arange(ids.numel(), device="cuda")) % len(self._coins)]
        self._at.add_(ids.numel())
        state.ids.copy_(torch.where((coins.view_as(ids) < 0.3) & (ids > 0), ids - 1, ids))


@contextlib.contextmanager
def in_place(of: Forced | Oracle) -> Iterator[None]:
    """The graphs captured here have the launches of `of`."""
    with mock.patch.object(input_batch, "propose", of.propose):
        if isinstance(of, Forced):
            with mock.patch.object(graph_runner, "accept", of.accept):
                yield
        else:
            yield


def speculation(limits: dict[str, float], step_tokens: int) -> dict[str, Any]:
    """Steps of an 8B model by rows and drafts, the gain at a set rate, and its decode steps with and without
    graphs for drafts."""
    plain = llama_8b(step_tokens)
    found: dict[str, Any] = {"without drafts": {rows: step(plain, rows)[0] for rows in (*ROWS, 256)}}
    end(plain)
    forced = Forced()
    with in_place(forced):
        built = llama_8b(step_tokens, max_drafts=7)
        found["warm_up_s"] = {"without drafts": plain.warm_up_s, "with drafts": built.warm_up_s}
        found["none asked for"] = {rows: step(built, rows)[0] for rows in (*ROWS, 256)}
        found["auto over off at 256"] = found["none asked for"][256] / found["without drafts"][256]
        print("without drafts, none asked for (ms)", found, flush=True)
        found["rows"] = [_row(built, forced, rows) for rows in ROWS]
        found["kernels"] = {
            f"{rows} rows, {count} drafts": kernels(built, rows, count)
            for rows, count in ((32, 0), (32, 3), (128, 0), (64, 0), (64, 3))
        }
        forced.rate.fill_(RATES[0])
        found["in flight"] = {
            f"{rows} rows, {flight} steps": step(built, rows, 3, flight)[0]
            for rows, flight in itertools.product((1, 64), (2, 4))
        }
        print("in flight", found["in flight"], flush=True)
    found["compiled under a request"] = built.own._compiles.kernels
    end(built)
    return found


def _row(built: Built, forced: Forced, rows: int) -> dict[str, Any]:
    off_ms = [step(built, rows)[0]]
    timed = {}
    for count, rate in ((3, RATES[0]), (3, RATES[1]), (1, RATES[0]), (7, RATES[0])):
        forced.rate.fill_(rate)
        timed[count, rate] = step(built, rows, count)
    off_ms.append(step(built, rows)[0])
    mean_ms, (ratio, *gains) = sum(off_ms) / 2, PREDICTED[rows]
    found: dict[str, Any] = {"rows": rows, "off_ms": off_ms}
    for (count, rate), (step_ms, tokens) in timed.items():
        expected = sum(rate**i for i in range(1 + count))
        found[f"{count} drafts at {rate}"] = {
            "step_ms": step_ms, "tokens": tokens, "expected": expected, "of a step": step_ms / mean_ms,
            "gain": expected * mean_ms / step_ms,
        }  # fmt: skip
    three = [found[f"3 drafts at {rate}"] for rate in RATES]
    found["of the predicted step"] = three[0]["of a step"] / ratio
    found["of the predicted gain"] = [each["gain"] / gain for each, gain in zip(three, gains, strict=True)]
    print("rows", found, flush=True)
    return found


def step(built: Built, rows: int, count: int = 0, in_flight: int = 2) -> tuple[float, float]:
    """The time of a decode step at 1k context with `count` drafts a row, in ms, and its tokens a row."""
    driver, steps = Driver(built.backend), STEPS + WARM_STEPS
    tables = dict(driver.open(slot, CONTEXT, CONTEXT + 1 + steps * (1 + count)) for slot in range(rows))
    plans = [driver.plan([(slot, CONTEXT - 1, 1, FROM_HOST) for slot in range(rows)], tables)]
    for i in range(steps):
        fed, at = AT_DEVICE if count else FROM_DEVICE, CONTEXT + i * (1 + count)
        plans.append(driver.plan([(slot, at, 1 + count, fed) for slot in range(rows)], {}))
    ends_s = driver.run(plans, in_flight)
    counted = driver.tokens[WARM_STEPS + 1 : -1]
    driver.close()
    took_ms = (ends_s[-2] - ends_s[WARM_STEPS]) / (len(ends_s) - 2 - WARM_STEPS) * 1e3
    return took_ms, sum(counted) / len(counted) / rows


def kernels(built: Built, rows: int, count: int, times: int = 16) -> dict[str, float]:
    """Time of each kernel in a step, in us, the longest first, with the number of its launches."""
    from torch.profiler import ProfilerActivity, profile

    driver = Driver(built.backend)
    tables = dict(driver.open(slot, CONTEXT, CONTEXT + 1 + 2 * times * (1 + count)) for slot in range(rows))
    plans = [driver.plan([(slot, CONTEXT - 1, 1, FROM_HOST) for slot in range(rows)], tables)]
    for i in range(2 * times):
        fed, at = AT_DEVICE if count else FROM_DEVICE, CONTEXT + i * (1 + count)
        plans.append(driver.plan([(slot, at, 1 + count, fed) for slot in range(rows)], {}))
    driver.run(plans[:times])
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        driver.run(plans[times:])
        torch.cuda.synchronize()
    driver.close()
    events: list[Any] = sorted(recorded.key_averages(), key=lambda event: -event.self_device_time_total)
    steps = len(plans) - times
    found = {
        f"{event.key[:90]} x{event.count / steps:.0f}": event.self_device_time_total / steps
        for event in events[:14]
    }
    print("kernels", rows, count, {key: round(value) for key, value in found.items()}, flush=True)
    return found


def same_ids(limits: dict[str, float], step_tokens: int) -> dict[str, Any]:
    """The ids of a small model with and without drafts: they must be the same in float32 and in deterministic
    mode."""
    found = {}
    for name, options in (
        ("f32", {"dtype": "f32"}), ("f32 deterministic", {"dtype": "f32", "deterministic": True}),
        ("bf16 deterministic", {"deterministic": True}), ("bf16", {}), ("KV in fp8", {"kv_dtype": "fp8"}),
    ):  # fmt: skip
        found[name] = _compared(name, options)
    return found


def _compared(name: str, options: dict[str, Any]) -> dict[str, Any]:
    oracle = Oracle(32, 2048)
    prompts = [[(slot * 7919 + i * 31) % 1000 + 300 for i in range(PROMPT)] for slot in range(SEQUENCES)]
    with in_place(oracle):
        built = llama_8b(2048, SMALL, slots=32, max_context=2048, max_drafts=7, blocks=4096, **options)
        wanted = generate(built.backend, 0, prompts, WISHES, PROMPT + 41)
        for slot, ids in wanted.ids.items():
            oracle.truth[slot, PROMPT : PROMPT + len(ids)] = torch.tensor(ids, dtype=torch.int32)
        found: dict[str, Any] = {"off": wanted.digest}
        for count in COUNTS:
            own = generate(built.backend, count, prompts, WISHES, PROMPT + 41)
            unlike = [slot for slot in wanted.ids if own.ids[slot] != wanted.ids[slot]]
            found[f"{count} drafts"] = {
                "sha256": own.digest, "accepted": own.kept, "drafted": own.drafted, "unlike": len(unlike),
            }  # fmt: skip
        found["compiled under a request"] = built.own._compiles.kernels
        end(built)
    print("same ids", name, found, flush=True)
    return found


def copies(limits: dict[str, float], step_tokens: int) -> dict[str, Any]:
    """SmolLM2 on prompts to repeat a text, its drafts from there: tokens/s with and without drafts."""
    files = resolve(DEFAULT_MODEL, load().settings.cache_dir)
    words, vocabulary = random.Random(3), load_vocabulary(files)
    found: dict[str, Any] = {}
    prompts = []
    for _ in range(8):
        text = " ".join(words.choices(_WORDS, k=220))
        asked = f"<|im_start|>user\nRepeat this text exactly:\n{text}<|im_end|>\n<|im_start|>assistant\n"
        prompts.append(vocabulary.encode(asked + text[:60], special=True))
    for name, options in (
        ("bf16", {"dtype": "bf16"}), ("bf16 deterministic", {"dtype": "bf16", "deterministic": True}),
        ("f32", {"dtype": "f32"}),
    ):  # fmt: skip
        engine = build(TorchOptions(
            model_path=files.path, model_name="copies", device="cuda", slots=16, max_context=2048,
            max_step_tokens=4096, blocks=4096, max_drafts=7, **options,
        ))  # fmt: skip
        engine.warm_up()
        for rows in (1, 8):
            rates: dict[int, list[float]] = {}
            runs: dict[int, Generated] = {}
            for count in (0, *COUNTS) * 3:
                own = generate(engine, count, prompts[:rows], (Sampling(temperature=0.0),))
                rates.setdefault(count, []).append(own.tok_s)
                runs[count] = own
            off = statistics.median(rates[0])
            found[f"{name}, {rows}"] = {
                count: {
                    "tok_s": rates[count], "gain": statistics.median(rates[count]) / off,
                    "sha256": own.digest, "same": own.ids == runs[0].ids,
                    "kept": own.kept, "drafted": own.drafted,
                }
                for count, own in runs.items()
            }  # fmt: skip
            print("copies", name, rows, found[f"{name}, {rows}"], flush=True)
        engine.close()
        torch.cuda.empty_cache()
    return found


@dataclass(frozen=True, slots=True)
class Generated:
    """The ids of sequences by slot, and how many of how many drafts became tokens."""

    ids: dict[int, list[int]]
    kept: int
    drafted: int
    tok_s: float  # after the first ids

    @property
    def digest(self) -> str:
        """SHA-256 of the ids."""
        return hashlib.sha256(repr(sorted(self.ids.items())).encode()).hexdigest()[:16]


def generate(
    backend: Backend, count: int, prompts: list[list[int]], wishes: Sequence[Sampling], first_length: int = 0
) -> Generated:
    """TOKENS ids after each prompt with `count` drafts a row, two steps in flight. The first one ends at
    `first_length`."""
    driver, slots = Driver(backend, seed=count), range(len(prompts))
    tables: dict[int, list[int]] = {}
    for slot, tokens in enumerate(prompts):
        room, limit = len(tokens) + (TOKENS + 4) * (1 + count), 0 if slot else first_length
        wish = wishes[slot % len(wishes)]
        tables |= dict([driver.open_with(slot, tokens, room, wish, seed=slot * 77, max_length=limit)])
    ids: dict[int, list[int]] = {slot: [] for slot in slots}
    kept = drafted = 0

    def sample(pending: Pending) -> None:
        nonlocal kept, drafted
        output = backend.sample(pending)
        assert not output.row_errors, output.row_errors
        counts, at = output.counts or [1] * len(prompts), 0
        for slot, its in enumerate(counts):
            ids[slot] += [token for token in output.ids[at : at + its] if token >= 0]
            at += its
        drafted += sum(output.drafted)
        kept += sum(output.counts) - len(output.counts)

    plan = driver.plan([(slot, 0, len(tokens), FROM_HOST) for slot, tokens in enumerate(prompts)], tables)
    sample(backend.forward(plan))
    began_s, pending = time.monotonic(), deque[Pending]()
    fed = AT_DEVICE if count else FROM_DEVICE
    for i in range(TOKENS):
        rows = [(slot, len(tokens) + i * (1 + count), 1 + count, fed) for slot, tokens in enumerate(prompts)]
        pending.append(backend.forward(driver.plan(rows, {})))
        if len(pending) == 2:
            sample(pending.popleft())
        if min(len(its) for slot, its in ids.items() if slot or not first_length) >= TOKENS:
            break
    took_s, made = time.monotonic() - began_s, sum(map(len, ids.values())) - len(prompts)
    while pending:
        sample(pending.popleft())
    driver.close()
    cut = {slot: its[:TOKENS] for slot, its in ids.items()}
    return Generated(cut, kept, drafted, made / took_s)
