"""Measures prompts through the whole engine on several GPUs, with whole steps and with micro-batches.

    python -m loadtest.gpu.serve_ranks --ranks 2 --out gpu_serve_ranks2_h200.json

Two fleets of processes on the same GPUs, loaded in turn: `--overlap auto/off` and `auto/auto`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from loadtest.fleet import MODEL
from loadtest.gpu.readers import body_of, some_tokens
from loadtest.gpu.serve import NO_BOUNDS, write_model
from loadtest.gpu.shape import LLAMA_8B, QWEN3_30B_A3B
from loadtest.real.served import Served, env_of, served
from loadtest.real.steady import steps_of

MODELS = {"Llama-8B": LLAMA_8B, "Qwen3-30B-A3B": QWEN3_30B_A3B}
MODES = {"off": "auto/off", "auto": "auto"}
PROMPT, PROMPTS, ROUNDS = 2048, 32, 6  # the first round does not count
STEP_TOKENS, BLOCKS = 8192, 16_384


async def prefill(fleet: Served, name: str) -> tuple[float, int, int]:
    """All prompts at once, for one token each: tokens a second, and how many steps of them came in halves."""
    rng, loop = random.Random(name), asyncio.get_running_loop()
    bodies = [body_of(f"{name}-{i}", some_tokens(rng, PROMPT), 1) for i in range(PROMPTS)]
    began_s = loop.time()
    await fleet.all(bodies)
    took_s = loop.time() - began_s
    steps = await steps_of(fleet, f"{name}-{PROMPTS - 1}")
    chunks = [step for step in steps if step["prefill_tokens"]]
    return PROMPT * PROMPTS / took_s, sum(bool(step["segments"]) for step in chunks), len(chunks)


async def compare(folder: str, ranks: int) -> dict[str, Any]:
    """Both modes of one model, in turn."""
    base = env_of(
        backend="dummy", model=folder, model_name=MODEL, device=f"cuda/tp{ranks}", dtype="bf16", l1="off",
        max_context=8192, slots=64, kv_blocks=BLOCKS, step_tokens=STEP_TOKENS, slo=NO_BOUNDS,
        policy="batching=prefill_first", log_level="info",
    )  # fmt: skip
    async with AsyncExitStack() as stack:
        fleets = {  # one after the other: at its start an engine measures
            mode: await stack.enter_async_context(served(base | env_of(overlap=overlap)))
            for mode, overlap in MODES.items()
        }
        found: dict[str, list[tuple[float, int, int]]] = {mode: [] for mode in MODES}
        for number in range(ROUNDS):
            for mode, fleet in fleets.items():
                found[mode].append(await prefill(fleet, f"{mode}-{number}"))
    rates = {mode: statistics.median(rate for rate, *_ in rounds[1:]) for mode, rounds in found.items()}
    return {"tok_s": rates, "auto_to_off": rates["auto"] / rates["off"], "rounds": found}


async def measure(asked: argparse.Namespace) -> None:
    """The models, one after the other; what is found is written after each."""
    found: dict[str, Any] = {"ranks": asked.ranks, "prompt": PROMPT, "prompts": PROMPTS}
    for name in asked.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder), MODELS[name])
            found[name] = await compare(folder, asked.ranks)
        print(name, found[name], flush=True)
        if asked.out is not None:
            await asyncio.to_thread(asked.out.write_text, json.dumps(found, indent=1) + "\n")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.gpu.serve_ranks", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--out", type=Path)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
