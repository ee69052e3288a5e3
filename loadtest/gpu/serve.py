"""Measures the whole engine: `headrace up`, clients that read streams, an 8B model with random weights on the
GPU.

    python -m loadtest.gpu.serve --out gpu_serve_h200.json
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from loadtest.bench.arrivals import arrivals_us
from loadtest.command_line import parser_of
from loadtest.fleet import MODEL, Body, Fleet, fleet
from loadtest.gpu.multi_turn import multi_turn
from loadtest.gpu.readers import (
    ANSWER,
    Answer,
    bodies,
    body_of,
    figures,
    read,
    read_all,
    some_tokens,
    unequal,
)
from loadtest.gpu.shape import LLAMA_8B
from loadtest.gpu.steady import steady
from loadtest.recompute_overhead import arms_of
from services.scheduler.state.requests import DEFAULT_CLASSES
from shared.vocab.vocabulary import byte_characters

NO_BOUNDS = "standard=60000/10000/60000"  # ms: prompts come in at once, however long the steps take
BATCHES = (1, 32, 64, 128, 256)
CLOSED, REQUESTS = 64, 192
LONGER = 320  # ten seconds of 32 a second, as the peer's figures were taken
OVERLOAD = 256  # requests at once, more than the KV blocks hold
KV_BLOCKS, L1_MIB = 8192, 32_768  # of the runs that lack memory: 131,072 tokens
CHATS_L1_MIB = 49_152  # 96 conversations are 46 GB at the end
PARTS = "decode,loops,defaults,unequal,overload,multi_turn"  # and `overhead`, `slots`, by name only
CLIENTS, SHORT = 512, 128  # of `slots`: so many at once, with prompts and answers of so many tokens
OVERHEAD_ROUNDS = 2

Make = Callable[[str, int], list[Body]]  # name, requests


async def decode(fleet: Fleet) -> list[dict[str, Any]]:
    """Batches of decodes, from the scheduler's record of the steps."""
    found = []
    for batch in BATCHES:
        await fleet.all(bodies(f"decode-{batch}", batch))
        found.append({"batch": batch, **asdict(await steady(fleet, f"decode-{batch}-0"))})
        print(found[-1], flush=True)
    return found


async def closed_loop(fleet: Fleet, make: Make = bodies) -> dict[str, Any]:
    """So many requests in flight until all are answered, as their readers see it."""
    asked = make("closed", REQUESTS)
    prompts = sum(len(body["prompt"]) for body in asked)
    found = figures(await read_all(fleet.client, asked, CLOSED))
    return {"in_flight": CLOSED, "prompt_tokens": prompts, **found}


async def open_loop(fleet: Fleet, rate: float, requests: int, make: Make = bodies) -> dict[str, Any]:
    """Poisson arrivals at `rate` a second."""
    name = f"open-{rate:g}"
    due = zip(arrivals_us(requests, rate, 1.0, name), make(name, requests), strict=True)
    gc.collect()
    gc.freeze()  # the collector of this process would pass over all prompts: 100 ms that no server has cost
    began_s = time.monotonic()

    async def one(due_us: int, body: Body) -> Answer:
        await asyncio.sleep(began_s + due_us / 1e6 - time.monotonic())
        return await read(fleet.client, body)

    return {"rate": rate, **figures(await asyncio.gather(*(one(*each) for each in due)))}


async def overload(fleet: Fleet) -> dict[str, Any]:
    """Everything at once."""
    await fleet.all(bodies("warm-tiers", 8, 16))
    found = figures(await read_all(fleet.client, bodies("overload", OVERLOAD, 2 * ANSWER), OVERLOAD))
    scheduler = await fleet.scheduler()
    about = {"scheduler": scheduler["measured"], "tiers": scheduler.get("tiers", {})}
    return _printed({"at_once": OVERLOAD, **found, **about, "executor": await fleet.executor()})


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """Shapes, and a vocabulary in which each id that the weights know is a whole text. The bytes from 128 on
    have higher ids: one of them drawn at random makes a reader wait for the rest of a character, which would
    look like a pause of the server."""
    (folder / "config.json").write_text(json.dumps(config))
    characters = byte_characters()
    tokens = characters[:128]
    tokens += [f"t{i}" for i in range(len(tokens), config["vocab_size"])] + characters[128:]
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")


class Bench:
    """Fleets of the 8B model, and what is measured on them."""

    def __init__(self, folder: str, flags: Sequence[str]) -> None:
        self._flags = (
            "--backend", "dummy", "--model", folder, "--model-name", MODEL, "--device", "cuda",
            "--dtype", "bf16", "--max-context", "8192", "--slots", "256", "--no-durable", *flags,
        )  # fmt: skip

    def start(self, *flags: str, l1_mib: int = 0, slo: str = NO_BOUNDS) -> AbstractAsyncContextManager[Fleet]:
        """A fleet with these flags beside its own."""
        return fleet(*self._flags, "--slo", slo, *flags, l1_mib=l1_mib)

    async def part(self, name: str, sizes: Sequence[int], chat_modes: Sequence[str]) -> dict[str, Any]:
        """What one part of the command line finds."""
        if name == "decode":
            async with self.start("--step-tokens", "4096") as fleet:
                return {name: await decode(fleet)}
        if name == "loops":
            return {f"step_tokens_{size}": await self._loops(size) for size in sizes}
        if name in ("defaults", "unequal"):
            return {name: await self._loops(make=unequal if name == "unequal" else bodies)}
        if name == "overload":
            reservations = ("on_demand", "foreseen")
            return {
                name: {kv: await self._short(f"reservation={kv}", sizes[0], L1_MIB) for kv in reservations}
            }
        if name == "overhead":
            return {name: [await self._overhead(sizes[0]) for _ in range(OVERHEAD_ROUNDS)]}
        if name == "slots":
            return {name: {f"{slots}": await self._slots(slots) for slots in (CLIENTS // 2, CLIENTS)}}
        if name == "multi_turn":
            return {name: {mode: await self._chats(mode, sizes[-1]) for mode in chat_modes}}
        raise ValueError(f"there is no part {name!r}: {PARTS}, overhead, slots")

    async def _short(self, policy: str, step_tokens: int, l1_mib: int) -> dict[str, Any]:
        """The overload with few KV blocks."""
        memory = ("--kv-blocks", f"{KV_BLOCKS}", "--policy", policy, "--step-tokens", f"{step_tokens}")
        async with self.start(*memory, l1_mib=l1_mib) as fleet:
            return await overload(fleet)

    async def _overhead(self, step_tokens: int) -> dict[str, Any]:
        """The overload with each arm of the recompute overhead. Admission leaves nothing free for growth."""
        arms = arms_of(greedy=True)
        return {arm.name: await self._short(arm.policy, step_tokens, arm.tiers * L1_MIB) for arm in arms}

    async def _loops(self, step_tokens: int | None = None, make: Make = bodies) -> dict[str, Any]:
        """With steps of so many tokens, or with the default settings: budget and bounds follow."""
        flags = ("--step-tokens", f"{step_tokens}") if step_tokens else ()
        async with self.start(*flags, slo=NO_BOUNDS if step_tokens else DEFAULT_CLASSES) as fleet:
            await fleet.all(bodies(f"warm-{step_tokens}", 8, 16))
            found = {"closed": _printed(await closed_loop(fleet, make))}
            for rate, requests in ((16.0, REQUESTS), (32.0, REQUESTS if step_tokens else LONGER)):
                found[f"open_{rate:g}"] = _printed(await open_loop(fleet, rate, requests, make))
            return found

    async def _slots(self, slots: int) -> dict[str, Any]:
        """Many clients with short requests, and so many slots for them."""
        asked = [
            body_of(f"short-{i}", some_tokens(random.Random(i), SHORT), SHORT) for i in range(3 * CLIENTS)
        ]
        async with self.start("--slots", f"{slots}", slo=DEFAULT_CLASSES) as fleet:
            await fleet.all(bodies(f"warm-{slots}", 8, 16))
            return _printed(figures(await read_all(fleet.client, asked, CLIENTS)))

    async def _chats(self, mode: str, step_tokens: int) -> dict[str, Any]:
        flags = ("--kv-blocks", f"{KV_BLOCKS}", "--step-tokens", f"{step_tokens}", "--overlap", mode)
        async with self.start(*flags, l1_mib=CHATS_L1_MIB) as fleet:
            return _printed(await multi_turn(fleet))


async def measure(given: argparse.Namespace) -> None:
    """The parts one after the other; what is found is written after each."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), json.loads(given.shape.read_text()) if given.shape else LLAMA_8B)
        bench = Bench(folder, given.up)
        for part in given.parts.split(","):
            sizes = [int(size) for size in given.step_tokens.split(",")]
            found |= await bench.part(part, sizes, given.chat_modes.split(","))
            if given.out is not None:
                given.out.write_text(json.dumps(found, indent=1) + "\n")


def _printed(found: dict[str, Any]) -> dict[str, Any]:
    print({k: round(v, 2) for k, v in found.items() if isinstance(v, int | float)}, flush=True)
    return found


def main() -> None:
    """The command line."""
    parser = parser_of("gpu.serve", __doc__, up=True)
    parser.add_argument("--step-tokens", default="512,768,1024")
    parser.add_argument("--parts", default=PARTS)
    parser.add_argument("--chat-modes", default="auto,single,two_batch")
    parser.add_argument("--shape", type=Path, help="a config.json in place of that of Llama-3.1-8B")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
