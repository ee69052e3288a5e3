"""Measures what LoRA adapters cost on a CPU: 8 requests with 8 adapters and without, in turn, and memory.

    python -m loadtest.adapters --rounds 11 --many 300 --out adapters.json -- --dtype bf16

Adapters are random, of all linear layers of the default model. `adapters`: requests at once, each with an
adapter of its own; `one`: all with the same one; `base`: without. Each round has all three, in an order that
changes with it, and the first round only warms up. A ratio is that of one round: seconds of the base over
those of the other, also in CPU time of the executor, which other work disturbs less. With `--many` so many
more adapters are added, each is used once, and its resident memory is read. Flags after `--` go to `up`.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file

from loadtest.command_line import parser_of, report
from loadtest.fleet import MODEL, Body, Fleet, fleet, machine
from loadtest.processes import cpu_s, resident_bytes
from shared import bodies
from shared.client.client import error_of
from shared.nats import subjects

FIXED = {"temperature": 0, "ignore_eos": True, "speculate": False}
WAIT_US, LAYERS = 60_000_000, 30
SIZES = {  # rows and columns of the default model's linear layers
    "self_attn.q_proj": (576, 576), "self_attn.k_proj": (192, 576), "self_attn.v_proj": (192, 576),
    "self_attn.o_proj": (576, 576), "mlp.gate_proj": (1536, 576), "mlp.up_proj": (1536, 576),
    "mlp.down_proj": (576, 1536),
}  # fmt: skip


def write_adapter(folder: Path, seed: int, rank: int) -> Path:
    """A random adapter in PEFT's format, float32 as PEFT saves it."""
    chance, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for layer in range(LAYERS):
        for name, (height, width) in SIZES.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, width, generator=chance) / width**0.5
            tensors[f"{module}.lora_B.weight"] = torch.randn(height, rank, generator=chance) / 50
    folder.mkdir()
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


async def add(up: Fleet, folder: Path) -> str:
    """Add the adapter of a folder; its name."""
    name, body = f"{MODEL}:{folder.name}", bodies.encode(bodies.AdapterSet(path=str(folder)))
    reply = await up.bus.request(subjects.adapter(name), body, timeout_us=WAIT_US)
    if "error" in (answer := bodies.decode(bodies.Change, reply.data)):
        raise error_of(answer)
    return name


def request(model: str, tokens: int) -> Body:
    """A greedy request without drafts: all have the same work."""
    return {"model": model, "prompt": "The river", "max_tokens": tokens, **FIXED}


async def in_turn(up: Fleet, names: list[str], rounds: int, tokens: int) -> dict[str, Any]:
    """Tokens/s of each kind of requests, and the ratios of the rounds: median, least, most."""
    kinds = {"base": [MODEL] * len(names), "one": names[:1] * len(names), "adapters": names}
    took: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    (pid,) = up.executor_pids()
    for number in range(rounds + 1):
        for kind in [*kinds][number % 3 :] + [*kinds][: number % 3]:
            began_s, before_s = time.monotonic(), cpu_s(pid)
            await up.all(request(model, tokens) for model in kinds[kind])
            took[kind].append((time.monotonic() - began_s, cpu_s(pid) - before_s))
    took = {kind: times[1:] for kind, times in took.items()}
    found: dict[str, Any] = {"tokens": len(names) * tokens, "seconds": took}
    for kind, (what, at) in product(("one", "adapters"), (("tokens/s", 0), ("CPU time", 1))):
        ratios = sorted(base[at] / other[at] for base, other in zip(took["base"], took[kind], strict=True))
        found[f"{kind} / base, {what}"] = [round(r, 3) for r in (median(ratios), ratios[0], ratios[-1])]
    found["tokens_per_s"] = {k: round(found["tokens"] / median(s for s, _ in t), 1) for k, t in took.items()}
    return found


async def measured(given: Any, home: Path) -> dict[str, Any]:
    """The figures of a fleet."""
    flags = ("--lora-places", str(given.requests), "--lora-rank", str(given.rank), *given.up)
    found: dict[str, Any] = {"machine": machine(), "flags": flags}
    async with fleet(*flags) as up:
        (pid,) = up.executor_pids()
        names = [await add(up, write_adapter(home / f"a{i}", i, given.rank)) for i in range(given.requests)]
        if given.rounds:
            found |= await in_turn(up, names, given.rounds, given.tokens)
        before_bytes = resident_bytes(pid)
        for number in range(given.requests, given.requests + given.many):
            folder = write_adapter(home / f"a{number}", number, given.rank)
            await up.all([request(await add(up, folder), 1)])
            shutil.rmtree(folder)  # the executor has a copy
        if given.many:
            held, grown = await up.executor(), resident_bytes(pid) - before_bytes
            found["memory"] = {
                "before_mib": before_bytes >> 20, "added": given.many, "grown_mib": grown >> 20,
                "copies": held["adapters"], "copies_mib": held["adapter_bytes"] >> 20,
            }  # fmt: skip
    return found


def main() -> None:
    """The program."""
    parser = parser_of("adapters", __doc__, up=True)
    for name, number in (("rounds", 11), ("requests", 8), ("tokens", 96), ("rank", 8), ("many", 0)):
        parser.add_argument(f"--{name}", type=int, default=number, help=f"default: {number}")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        report(asyncio.run(measured(given, Path(home))), given.out)


if __name__ == "__main__":
    main()
