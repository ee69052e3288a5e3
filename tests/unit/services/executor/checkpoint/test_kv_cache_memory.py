"""The memory of a KV cache: on a CPU, where only blocks in use take any, and on a GPU beside others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.executor.plan_maker import PlanMaker, Row
from support.executor.tiny_models import save_tiny

from services.executor.build import engine_builder
from services.executor.checkpoint import kv_cache
from services.executor.checkpoint.config import read_shapes
from services.executor.checkpoint.kv_cache import allocate, block_bytes, fitting_blocks, gpu_blocks
from services.executor.checkpoint.loader import TorchOptions, beside_bytes
from services.executor.cpu.engine import build
from shared.config import load
from shared.errors import SetupError

GPU = torch.device("cuda")
GIB, MIB = 1 << 30, 1 << 20
TOKENS = 16  # of a block


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_blocks_take_memory_when_they_are_written(tmp_path: Path) -> None:
    shapes = read_shapes(save_tiny("llama", tmp_path))
    size = block_bytes(shapes, TOKENS, torch.float32)
    blocks = 256 * MIB // size
    before = resident_bytes()
    cache = allocate(shapes, blocks, TOKENS, torch.float32, torch.empty(0))
    assert resident_bytes() - before < 16 * MIB
    used = blocks // 2
    cache.tensor[:used].fill_(1)
    written = resident_bytes() - before
    assert 0.9 * used * size < written < 0.6 * blocks * size
    cache.drop()
    assert resident_bytes() - before < 16 * MIB


def test_an_engine_that_has_warmed_up_and_answered_holds_the_blocks_of_the_answer_alone(
    tmp_path: Path,
) -> None:
    folder = save_tiny("llama", tmp_path)
    size = block_bytes(read_shapes(folder), TOKENS, torch.float32)
    blocks = 256 * MIB // size
    options: dict[str, Any] = {"model_path": folder, "model_name": "m", "device": "cpu", "slots": 4}
    small = build(TorchOptions(**options, blocks=64))  # what an engine takes with next to no cache
    small.warm_up()
    before = resident_bytes()
    backend = build(TorchOptions(**options, blocks=blocks))
    backend.warm_up()
    maker = PlanMaker(backend)
    maker.open(0, [5, 6, 7])
    backend.sample(backend.forward(maker.plan([Row(0, 0, 3, feeds=(0,))])))
    assert resident_bytes() - before < blocks * size / 4


def test_the_cache_that_is_the_only_tier_has_the_share_of_l1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "available_bytes", lambda: 4 * GIB)
    beside = fitting_blocks(MIB, 10**6)
    assert (beside, fitting_blocks(MIB, 10**6, only_tier=True)) == (1023, 2047)
    monkeypatch.setattr(kv_cache, "available_bytes", lambda: 400 * GIB)
    assert fitting_blocks(MIB, 10**6, only_tier=True) == 3071
    assert fitting_blocks(MIB, 100, only_tier=True) == 100, "no more than sequences can use"
    monkeypatch.setattr(kv_cache, "available_bytes", lambda: GIB)
    beside = fitting_blocks(MIB, 10**6)
    assert (beside, fitting_blocks(MIB, 10**6, only_tier=True)) == (255, 511), "of a small machine"


@pytest.mark.parametrize(
    ("more", "alone"),
    [
        ({}, True),
        ({"l1": "64"}, False),
        ({"l1": "off"}, False),
        ({"l2": "redis://r:1"}, False),
        ({"kv_blocks": 64}, False),
        ({"awake_gib": 1.0}, False),
        ({"executors": 2}, False),
    ],
)
def test_l1_size_or_a_second_executor_brings_l1_back(
    more: dict[str, Any], alone: bool, tmp_path: Path
) -> None:
    flags = {"model": str(save_tiny("llama", tmp_path)), "device": "cpu", "slots": 2, "max_context": 64}
    assert engine_builder(load(flags={**flags, **more}).settings)().info.only_tier is alone


def test_memory_beside_kv_grows_with_slots_and_steps(tmp_path: Path) -> None:
    shapes, context = read_shapes(save_tiny("llama", tmp_path)), 1_024

    def needed(**fields: int) -> int:
        options = TorchOptions(model_path=tmp_path, model_name="m", max_step_tokens=2_048, **fields)
        return beside_bytes(shapes, options, context)

    usual, table = needed(slots=256), context // TOKENS
    assert needed(slots=1_024) - usual == 768 * (22 * shapes.vocab + 4 * table)
    assert needed(slots=256, max_drafts=7) - usual == 257 * 4 * context
    assert usual > 512 * MIB, "graphs take some, too"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 100 GiB of which another program has 20, and torch here 15 of 16 in use."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (64 * GIB, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 15 * GIB)
    monkeypatch.setattr(kv_cache, "_CONTEXT_BYTES", GIB)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("limit", "beside_gib", "blocks"),
    [
        ("", 1, int(64 * 1024 * 0.9) - 1),  # nine tenths of what is free, but for the spare block
        ("", 10, 54 * 1024 - 1),  # or all but what slots and steps need
        ("0.6", 1, int(44 * 1024 * 0.9) - 1),  # 60 GiB without the 16 that are held
        ("60GiB", 1, int(44 * 1024 * 0.9) - 1),
        ("20GiB", 2, 2 * 1024 - 1),
        ("0.9", 1, int(64 * 1024 * 0.9) - 1),  # 74 GiB within the limit, and 64 of them are free
        ("1", 1, int(64 * 1024 * 0.9) - 1),
    ],
)
def test_kv_blocks_of_a_gpu_stay_within_its_share(limit: str, beside_gib: int, blocks: int) -> None:
    assert gpu_blocks(MIB, GPU, 10**6, beside_gib * GIB, limit) == blocks
    assert gpu_blocks(MIB, GPU, 100, beside_gib * GIB, limit) == 100, "no more than sequences can use"


@pytest.mark.usefixtures("gpu")
def test_given_kv_blocks_of_a_gpu_have_to_fit_into_its_share() -> None:
    assert gpu_blocks(MIB, GPU, 10, GIB, "", 10**6) == 10**6, "without a share the number counts"
    most = 43 * 1024 - 1
    assert gpu_blocks(MIB, GPU, 10, GIB, "0.6", most) == most
    refused = (
        r"44.0 GiB of the GPU are left within gpu_memory 0.6, and .* take 1.0: 44032 KV blocks of 1.00 MiB"
    )
    with pytest.raises(SetupError, match=refused):
        gpu_blocks(MIB, GPU, 10, GIB, "0.6", most + 1)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("limit", ["10GiB", "17GiB", "0.16"])
def test_a_share_without_room_for_a_block_is_refused(limit: str) -> None:
    with pytest.raises(
        SetupError, match=r"left within gpu_memory .* raise gpu_memory, or lower kv_blocks, slots"
    ):
        gpu_blocks(MIB, GPU, 10, GIB, limit)


def test_a_share_of_a_gpu_is_refused_on_a_cpu(tmp_path: Path) -> None:
    flags = {"model": str(save_tiny("llama", tmp_path)), "device": "cpu", "gpu_memory": "0.5"}
    with pytest.raises(SetupError, match=r"gpu_memory is for GPUs.*use kv_blocks"):
        engine_builder(load(flags=flags).settings)()
