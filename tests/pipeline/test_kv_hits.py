"""Never a wrong token, part two: a prefix is worth the same wherever it lies, and KV of another tenant, of
another model layout, or damaged in the remote store, is no hit."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.pipeline.tiered import Answer, Digests, Tiered, Values, differ, patient
from support.small_llama import VOCAB, write_small_llama

from services.kv_offload.actor import KvOffloadActor
from services.kv_offload.l2.worker import SIZE_KEY
from services.kv_offload.state import Counters

BLOCK = 8
SIZES: dict[str, Any] = {"model_name": "tiny", "block_tokens": BLOCK, "kv_blocks": 100, "slots": 4,
                         "max_context": 128, "step_tokens": 64}  # fmt: skip
PROMPT = random.Random(7).choices(range(3, VOCAB), k=41)
CACHED = 40  # of its tokens: five full blocks, and one that is always computed
TOKENS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_llama(tmp_path_factory.mktemp("model") / "tiny", hidden=64, layers=2)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    patient(monkeypatch)


def blocks_in(remote: Values) -> list[str]:
    """Names of its values that are blocks."""
    return sorted(name for name in remote.values if not name.endswith(SIZE_KEY.hex()))


async def ask(pipeline: Tiered, tenant: str = "one") -> Answer:
    """The request, with nothing of it left on the device afterwards that no tier holds."""
    answer = await pipeline.ask(PROMPT, TOKENS, tenant=tenant)
    await pipeline.stored_all()
    return answer


async def fill(pipeline: Tiered) -> Answer:
    """Bring the prompt into L1, and into L2 by a second use."""
    cold = await ask(pipeline)
    pipeline.forced.evict()
    await ask(pipeline)
    remote = pipeline.remote
    assert remote is not None
    await pipeline.until(lambda: len(blocks_in(remote)) >= CACHED // BLOCK)
    pipeline.forced.evict()
    return cold


def figures(pipeline: Tiered) -> Counters:
    """What the kv_offload of now has counted."""
    actor = pipeline.runtimes["kv_offload-1"].actor
    assert isinstance(actor, KvOffloadActor)
    return actor._core.state.counters


@pytest.mark.parametrize("deterministic", [False, True])
async def test_hits_of_every_tier_are_equal(deterministic: bool, model: Path) -> None:
    """The same chunk is computed after the same bytes: the same bits."""
    async with Tiered.up(model, Values(), deterministic=deterministic, **SIZES) as pipeline:
        meter = pipeline.meter
        cold = await ask(pipeline)
        in_hbm = await ask(pipeline)
        assert (meter.l1_hit_blocks, meter.l2_hit_blocks) == (0, 0)
        assert pipeline.forced.evict() >= CACHED // BLOCK
        in_l1 = await ask(pipeline)
        assert (meter.l1_hit_blocks, meter.l2_hit_blocks) == (CACHED // BLOCK, 0)
        await fill(pipeline)
        await pipeline.restart_kv_offload()
        assert figures(pipeline).l2_gets == 0
        in_l2 = await ask(pipeline)
        assert figures(pipeline).l2_gets == figures(pipeline).promotions == CACHED // BLOCK
        assert pipeline.forced.restored == meter.l1_hit_blocks + meter.l2_hit_blocks
        assert [a.cached_tokens for a in (cold, in_hbm, in_l1, in_l2)] == [0, CACHED, CACHED, CACHED]
        assert differ(in_hbm, in_l1) == differ(in_hbm, in_l2) == 0
        assert differ(cold, in_hbm) <= (0 if deterministic else 1e-4)


async def test_another_tenant_hits_nothing(model: Path) -> None:
    async with Tiered.up(model, Values(), **SIZES) as pipeline:
        mine = await fill(pipeline)
        loads, lookups = pipeline.meter.loads, pipeline.forced.state.tiers.next_job
        theirs = await ask(pipeline, "two")
        assert theirs.cached_tokens == 0
        assert pipeline.meter.loads == loads
        assert pipeline.forced.state.tiers.next_job > lookups, "no tier was asked"
        assert differ(mine, theirs) == 0
        pipeline.forced.evict()
        assert (await ask(pipeline)).cached_tokens == CACHED
        assert pipeline.meter.loads == loads + 1


def other_weights(folder: Path) -> dict[str, Any]:
    return {"model": str(write_small_llama(folder / "other", hidden=64, layers=2, seed=6))}


def other_rope(folder: Path) -> dict[str, Any]:
    config = write_small_llama(folder / "other", hidden=64, layers=2) / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps"', '"rope_theta": 20000.0, "rms_norm_eps"'))
    return {"model": str(config.parent)}


def other_layers(folder: Path) -> dict[str, Any]:
    return {"model": str(write_small_llama(folder / "other", hidden=64, layers=3))}


OTHERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "dtype": lambda folder: {"dtype": "bf16"},
    "block_tokens": lambda folder: {"block_tokens": 16},
    "model_name": lambda folder: {"model_name": "small"},
    "weights": other_weights,
    "rope": other_rope,
    "layers": other_layers,
}


@pytest.mark.parametrize("what", OTHERS)
async def test_another_layout_hits_nothing_in_l2(what: str, model: Path, tmp_path: Path) -> None:
    remote, stored, other = Values(), Digests(), OTHERS[what](tmp_path)
    async with Tiered.up(model, remote, stored=stored, **SIZES) as pipeline:
        cold = await fill(pipeline)
    async with Tiered.up(other.pop("model", model), remote, **{**SIZES, **other}) as pipeline:
        again = await ask(pipeline)
        assert again.cached_tokens == 0
        assert (pipeline.meter.loads, figures(pipeline).corrupt) == (0, 0)
        assert differ(again, await ask(pipeline, "of its own")) == 0
    async with Tiered.up(model, remote, stored=stored, **SIZES) as pipeline:
        same = await ask(pipeline)
        assert same.cached_tokens == CACHED
        assert figures(pipeline).l2_gets == pipeline.forced.restored == CACHED // BLOCK
        assert differ(cold, same) <= 1e-4


@pytest.mark.parametrize("what", [what for what in OTHERS if what != "model_name"])
async def test_another_layout_hits_nothing_in_l1(what: str, model: Path, tmp_path: Path) -> None:
    """Another executor on the same host, above the same kv_offload."""
    async with Tiered.up(model, Values(), **SIZES) as pipeline:
        cold = await fill(pipeline)
        loads = pipeline.meter.loads
        usual = {name: getattr(pipeline.settings, name) for name in ("model", "dtype", "block_tokens")}
        await pipeline.replace_executor(**OTHERS[what](tmp_path))
        again = await ask(pipeline)
        assert again.cached_tokens == 0
        assert pipeline.meter.loads == loads
        assert differ(again, await ask(pipeline, "of its own")) == 0
        await pipeline.replace_executor(**usual)
        same = await ask(pipeline)
        assert same.cached_tokens == CACHED
        assert pipeline.meter.loads == loads + 1
        assert differ(cold, same) <= 1e-4


def flip(values: dict[str, bytes], names: list[str]) -> None:
    """One bit of each, at places all over header and payload."""
    dice = random.Random(3)
    for name in names:
        value = bytearray(values[name])
        value[dice.choice((dice.randrange(128), dice.randrange(128, len(value))))] ^= 1 << dice.randrange(8)
        values[name] = bytes(value)


def truncate(values: dict[str, bytes], names: list[str]) -> None:
    for cut, name in enumerate(names, 1):
        values[name] = values[name][:-cut]


def swap(values: dict[str, bytes], names: list[str]) -> None:
    """Each under the name of the next."""
    turned = [values[name] for name in (*names[1:], names[0])]
    values.update(zip(names, turned, strict=True))


@pytest.mark.parametrize("damage", [flip, truncate, swap])
async def test_damaged_values_never_load(
    damage: Callable[[dict[str, bytes], list[str]], None], model: Path
) -> None:
    remote = Values()
    async with Tiered.up(model, remote, **SIZES) as pipeline:
        cold = await fill(pipeline)
        await pipeline.restart_kv_offload()
        damage(remote.values, blocks_in(remote))
        before = pipeline.meter.loads
        again = await ask(pipeline)
        assert pipeline.meter.loads == before
        assert figures(pipeline).promotions == 0
        assert figures(pipeline).corrupt >= CACHED // BLOCK
        assert again.cached_tokens == 0
        assert differ(cold, again) == 0
