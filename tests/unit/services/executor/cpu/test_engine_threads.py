"""An engine computes with the number of threads that its steps have shown to be quickest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.executor.plan_maker import PlanMaker, Row
from support.executor.tiny_models import save_tiny

from services.executor.checkpoint import loader
from services.executor.checkpoint.loader import TorchOptions
from services.executor.cpu import autotune, engine
from shared.messages import AT_DEVICE, Sampling, ints

KIND = "llama"


class Counted:
    """One thread less with each step."""

    def __init__(self, most: int, first: int, waits: Callable[[], float]) -> None:
        assert 0 <= waits() <= 1
        self.most, self.now = most, first
        self.seen: list[tuple[int, int]] = []

    def observe(self, tokens: int, took_us: int) -> None:
        self.seen.append((torch.get_num_threads(), tokens))
        self.now = max(1, self.now - 1)


@pytest.fixture(autouse=True)
def three_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setattr(loader, "usable_threads", lambda processes: 3)
    monkeypatch.setattr(autotune, "ThreadCount", Counted)
    yield
    torch.set_num_threads(before)


def built(
    folder: Path,
    *,
    threads: int = 0,
    first_threads: int = 0,
    deterministic: bool = False,
    kv_dtype: str = "auto",
    max_drafts: int = 0,
) -> engine.TorchBackend:
    return engine.build(
        TorchOptions(
            model_path=save_tiny(KIND, folder), model_name=KIND, device="cpu", dtype="f32", kv_dtype=kv_dtype,
            blocks=80,
            slots=8, threads=threads, first_threads=first_threads, deterministic=deterministic,
            max_drafts=max_drafts,
        )
    )  # fmt: skip


def test_every_step_is_seen_and_the_next_has_the_threads_of_the_choice(tmp_path: Path) -> None:
    backend = built(tmp_path)
    maker = PlanMaker(backend)
    maker.open(0, [1, 2, 3, 4, 5], Sampling(temperature=0.0))
    maker.prefill({0: 5})
    maker.decode({0: 6}, 2)
    count = backend._threads
    assert isinstance(count, Counted)
    assert count.seen == [(3, 5), (2, 1), (1, 1)]


def test_a_step_counts_with_the_drafts_that_it_computes(tmp_path: Path) -> None:
    """Else a step of one row would be the measure of steps of nine, which then look slow."""
    backend = built(tmp_path, max_drafts=8)
    maker = PlanMaker(backend)
    maker.open(0, [1, 2, 3, 4, 5], Sampling(temperature=0.0))
    (token,) = maker.prefill({0: 5}).ids
    assert token not in (1, 2, 3, 4, 5)  # nothing occurs twice, so no draft is found
    plan = replace(maker.plan([Row(0, 5, 9, True, (0,))]), from_device=ints([AT_DEVICE]))
    backend.sample(backend.forward(plan))
    count = backend._threads
    assert isinstance(count, Counted)
    assert count.seen[-1][1] == 1


@pytest.mark.parametrize(("threads", "deterministic", "has"), [(2, False, 2), (0, True, 3), (2, True, 2)])
def test_given_thread_count_and_a_deterministic_engine_keep_theirs(
    tmp_path: Path, threads: int, deterministic: bool, has: int
) -> None:
    backend = built(tmp_path, threads=threads, deterministic=deterministic)
    assert backend._threads is None
    assert torch.get_num_threads() == has


def test_torch_operators_keep_the_threads_that_their_bits_depend_on(tmp_path: Path) -> None:
    assert built(tmp_path, kv_dtype="fp8")._threads is None
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize(("cores", "first", "most"), [(3.0, 2, 3), (2.5, 2, 2), (2.5, 0, 3)])
def test_steps_do_not_try_more_threads_than_a_part_of_a_core_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: float, first: int, most: int
) -> None:
    monkeypatch.setattr(autotune, "usable_cores", lambda: cores)
    monkeypatch.setattr(autotune, "usable_threads", lambda: 3)
    count = built(tmp_path, first_threads=first)._threads
    assert isinstance(count, Counted)
    assert (count.now, count.most) == (first or 3, most)
