"""Never a wrong token, part one: a sequence that is paused at any time, loses everything that the device
holds of it and is brought back from L1 has the tokens and the logits of one that was never paused.

Every test compares bytes that come up with those that went down: support/pipeline/forced_pauses.py.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pipeline.tiered import Answer, Tiered, differ, patient
from support.small_llama import VOCAB, write_small_llama

from services.scheduler.state.requests import Sequence
from services.scheduler.state.state import Executor

BLOCK = 8
SIZES: dict[str, Any] = {"model_name": "tiny", "block_tokens": BLOCK, "kv_blocks": 200, "slots": 16,
                         "max_context": 128, "step_tokens": 64}  # fmt: skip
CLOSE = 1e-4  # of logits, at f32
MODES: dict[str, dict[str, Any]] = {
    "one step at a time": {"overlap": "single"},
    "two steps in flight": {"overlap": "run_ahead"},
    "prompt in chunks": {"overlap": "single", "step_tokens": 16},
    "bit by bit": {"overlap": "single", "deterministic": True},
    "bit by bit, KV in fp8": {"overlap": "single", "deterministic": True, "dtype": "f32/fp8"},
    "bit by bit, prompt in chunks": {"overlap": "run_ahead", "step_tokens": 16, "deterministic": True},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_llama(tmp_path_factory.mktemp("model") / "tiny", hidden=64, layers=2)


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that takes longer to compute than its blocks to be copied, on a busy machine, too."""
    return write_small_llama(tmp_path_factory.mktemp("model") / "tiny", hidden=192, layers=12)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    patient(monkeypatch)


def prompt(seed: int, tokens: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=tokens)


@pytest.mark.parametrize("mode", MODES)
async def test_a_pause_at_every_step(mode: str, model: Path) -> None:
    """Each index of a request of 21 + 14 tokens: within its prompt, on block borders, with partial tails."""
    async with Tiered.up(model, **{**SIZES, **MODES[mode]}) as pipeline:
        forced, meter, asked = pipeline.forced, pipeline.meter, prompt(1, 21)
        first = forced.executor.step
        cold = await pipeline.ask(asked, 14, tenant="cold")
        steps = forced.executor.step - first
        for index in range(1, steps + 1):
            loads, restored, lost = meter.loads, meter.restored_tokens, meter.recomputed_tokens
            forced.pause_at(index)
            again = await pipeline.ask(asked, 14, tenant=f"paused-{index}")
            assert again.cached_tokens == 0
            assert differ(cold, again) <= (0 if "bit by bit" in mode else CLOSE)
            assert meter.loads == loads + 1
            assert meter.restored_tokens >= restored + 16
            assert meter.recomputed_tokens <= lost + 2  # whose samples were in flight: tails come back, too
        assert forced.restored > steps
        assert meter.loads_failed == meter.loads_declined == 0
        if MODES[mode]["overlap"] == "single":
            assert forced.indices == list(range(1, steps + 1))


class Dice:
    """Pauses some of the running sequences, now and then; seeded."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __call__(self, executor: Executor) -> list[Sequence]:
        if self._random.random() > 0.2:
            return []
        able = [s for s in executor.running if not (s.turn.pinned or s.copies.load_job or s.parent)]
        return [s for s in able if self._random.random() < 0.4]


async def batch(pipeline: Tiered, tenant: str) -> list[Answer]:
    """16 requests at once; the even ones begin alike."""
    asked = [prompt(i, 5 + 3 * i) if i % 2 else prompt(0, 19) + prompt(i, 1 + 2 * i) for i in range(16)]
    return await asyncio.gather(*(pipeline.ask(p, 10 + i, tenant=tenant) for i, p in enumerate(asked)))


def rounds(enough: Callable[[], bool]) -> Iterator[int]:
    """At most ten, until something has happened often enough: which sequences run together is up to the
    machine."""
    for number in range(10):
        yield number
        if enough():
            return


@pytest.mark.parametrize(("seed", "mode"), [(1, "run_ahead"), (2, "two_batch"), (3, "deterministic")])
async def test_random_pauses_in_a_batch_of_16(seed: int, mode: str, model: Path) -> None:
    how = {"deterministic": True} if mode == "deterministic" else {"overlap": mode}
    async with Tiered.up(model, **SIZES, **how) as pipeline:
        forced, calm = pipeline.forced, await batch(pipeline, "calm")
        forced.wanted = Dice(seed)

        def enough() -> bool:
            return forced.pauses >= 16 and pipeline.meter.loads >= 8 and forced.restored >= 32

        for number in rounds(enough):
            wild = await batch(pipeline, f"wild-{number}")
            for one, other in zip(calm, wild, strict=True):
                assert differ(one, other) <= (0 if mode == "deterministic" else CLOSE)
        assert enough()


async def test_a_batch_that_does_not_fit(slow_model: Path) -> None:
    """No pause is forced: too few blocks, and the usual policies."""
    async with Tiered.up(slow_model, **{**SIZES, "kv_blocks": 30, "policy": ""}) as pipeline:
        async with Tiered.up(slow_model, **SIZES, l1="off") as roomy:
            calm = await batch(roomy, "calm")

        def enough() -> bool:
            return min(pipeline.meter.preemptions, pipeline.meter.loads, pipeline.forced.restored) > 0

        for number in rounds(enough):
            crowded = await batch(pipeline, f"crowded-{number}")
            for one, other in zip(calm, crowded, strict=True):
                assert differ(one, other) <= CLOSE
        assert enough()


@pytest.fixture
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


BORDERS = st.sampled_from([7, 8, 9, 15, 16, 17, 24, 25]) | st.integers(1, 40)


def test_any_length_and_any_pauses(model: Path, loop: asyncio.Runner) -> None:
    up = Tiered.up(model, **SIZES)
    pipeline = loop.run(up.__aenter__())
    numbers = iter(range(10**6))

    @settings(max_examples=8)
    @given(BORDERS, BORDERS, st.lists(st.integers(1, 40), min_size=1, max_size=3))
    def example(prompt_tokens: int, answer_tokens: int, pauses: list[int]) -> None:
        number = next(numbers)

        async def both() -> tuple[Answer, Answer]:
            asked = prompt(number, prompt_tokens)
            cold = await pipeline.ask(asked, answer_tokens, tenant=f"cold-{number}")
            pipeline.forced.pause_at(*pauses)
            return cold, await pipeline.ask(asked, answer_tokens, tenant=f"paused-{number}")

        cold, paused = loop.run(both())
        assert differ(cold, paused) <= CLOSE

    example()
    assert pipeline.meter.loads >= 10
    assert pipeline.forced.restored >= 20
    assert pipeline.meter.loads_failed == 0
    loop.run(up.__aexit__(None, None, None))
