"""Another executor of the same model name, with other weights or modes: real engines, all five actors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.pipeline.tiered import Tiered
from support.small_llama import write_small_llama

from shared.vocab.files import served_name

PROMPT = [*range(20, 44)]


def other_weights(folder: Path) -> dict[str, Any]:
    return {"model": str(write_small_llama(folder / "other", hidden=64, layers=2, seed=6))}


OTHERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "weights": other_weights,
    "dtype": lambda folder: {"dtype": "bf16"},
    "kv format": lambda folder: {"dtype": "f32/fp8"},
    "deterministic": lambda folder: {"deterministic": True},
}


@pytest.mark.parametrize("what", OTHERS)
async def test_executor_of_another_kind_stays_out_until_it_is_alone(what: str, tmp_path: Path) -> None:
    folder = write_small_llama(tmp_path / "m", hidden=64, layers=2)
    async with Tiered.up(folder, l1="off") as pipeline:
        state = pipeline.forced.state
        (wanted,) = {tuple((await pipeline.ask(PROMPT, 8)).ids)}
        name = served_name(pipeline.settings.model)
        peers = pipeline.runtimes["tokenizer-1"].mailbox.peers
        first = state.model_kinds[name].digest
        await pipeline.until(lambda: peers.model_digest(name) == first != "")
        change = {**OTHERS[what](tmp_path), "model_name": name}
        pipeline.settings = pipeline.settings.model_copy(update=change)
        await pipeline.add("executor", "executor-2")
        await pipeline.until(lambda: "executor-2" in state.excluded)
        kept_out = pipeline.runtimes["executor-2"].actor
        await pipeline.until(lambda: "executor-1 of" in str(kept_out.status().get("kept_out")))
        answers = {tuple((await pipeline.ask(PROMPT, 8)).ids) for _ in range(8)}
        assert answers == {wanted}
        assert kept_out.status()["steps"] == 0
        await pipeline.runtimes.pop("executor-1").finish(5)
        await pipeline.until(lambda: [*state.executors] == ["executor-2"])
        last = await pipeline.ask(PROMPT, 8)
        assert len(last.ids) == 8
        assert what != "weights" or tuple(last.ids) != wanted
        await pipeline.until(lambda: peers.model_digest(name) == state.model_kinds[name].digest != first)
        assert "kept_out" not in kept_out.status()
        pipeline.runtimes["executor-1"] = pipeline.runtimes.pop("executor-2")  # whose slots must be free now
