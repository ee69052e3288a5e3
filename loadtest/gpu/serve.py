"""Measures the whole engine: services as processes over a nats-server, clients that read streams, an 8B model
with random weights on the GPU.

    python -m loadtest.gpu.serve --out gpu_serve_h200.json
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from loadtest.fleet import MODEL
from loadtest.gpu.modes import by_mode
from loadtest.gpu.multi_turn import multi_turn, pinned, restores
from loadtest.gpu.readers import (
    ANSWER,
    Read,
    bodies,
    executor_status,
    figures,
    judging,
    read,
    read_all,
    unequal,
)
from loadtest.gpu.shape import LLAMA_8B
from loadtest.real.served import Body, Served, env_of, served
from loadtest.real.steady import steady
from loadtest.recompute_overhead.protocol import arms_of
from services.scheduler.state.requests import DEFAULT_CLASSES
from shared.vocab.vocabulary import byte_characters

NO_BOUNDS = "standard=60000/10000/60000"  # ms: prompts come in at once, whatever the steps take
BATCHES = (1, 32, 64, 128, 256)
CLOSED, REQUESTS = 64, 192
LONGER = 320  # ten seconds of 32 a second, as the peer's figures were taken
KV_BLOCKS, L1_MIB = 8192, 32_768  # of the runs that lack memory: 131,072 tokens
CHATS_L1_MIB = 49_152  # 96 conversations are 46 GB at the end
PARTS = "decode,short,loops,defaults,unequal,overload,multi_turn,modes"  # and `overhead`, by name only
OVERHEAD_ROUNDS = 2
SHORT = 80  # answers of one token: as from classifiers and probes


Make = Callable[[str, int], list[Body]]  # name, requests


def equal(name: str, rows: int) -> list[Body]:
    """Requests with prompts and answers of the usual lengths."""
    return bodies(name, rows, ANSWER)


async def decode(fleet: Served, short: int = 0) -> list[dict[str, Any]]:
    """Batches of decodes, each behind `short` answers of one token, from the scheduler's step record."""
    found = []
    for batch in BATCHES:
        name = f"decode-{batch}"
        if short:
            await fleet.all(bodies(f"short-{batch}", short, 1))
        await fleet.all(bodies(name, batch, ANSWER))
        one = await steady(fleet, f"{name}-0")
        found.append({"batch": batch, **asdict(one)})
        print(found[-1], flush=True)
    return found


async def closed_loop(fleet: Served, make: Make = equal) -> dict[str, Any]:
    """So many requests in flight until all are answered, as their readers see it."""
    loop = asyncio.get_running_loop()
    asked = make("closed", REQUESTS)
    began_s = loop.time()
    reads = await read_all(fleet, asked, CLOSED)
    prompts = sum(len(body["prompt"]) for body in asked)
    return {
        "in_flight": CLOSED, "requests": REQUESTS, "prompt_tokens": prompts,
        **figures(reads, loop.time() - began_s, _mean(asked)),
    }  # fmt: skip


async def open_loop(
    fleet: Served, rate: float, requests: int = REQUESTS, make: Make = equal
) -> dict[str, Any]:
    """Poisson arrivals at `rate` a second, scaled so that the last is due at requests / rate, as `vllm bench
    serve` does: 192 draws alone are off by 7 % (one standard deviation)."""
    rng = random.Random(17)
    at_s = list(itertools.accumulate(rng.expovariate(rate) for _ in range(requests)))
    scale = requests / rate / at_s[-1]
    asked = make(f"open-{rate:g}", requests)
    loop = asyncio.get_running_loop()
    gc.collect()
    gc.freeze()  # the collector of this process would pass over all prompts: 100 ms that no server has cost
    began_s = loop.time()

    async def one(due_s: float, body: dict[str, Any]) -> Read:
        await asyncio.sleep(began_s + due_s * scale - loop.time())
        return await read(fleet, body)

    reads = await asyncio.gather(*(one(due, body) for due, body in zip(at_s, asked, strict=True)))
    return {"rate": rate, "requests": requests, **figures(reads, loop.time() - began_s, _mean(asked))}


def _mean(asked: Sequence[Body]) -> float:
    return statistics.mean(int(body["max_tokens"]) for body in asked)


async def overload(fleet: Served) -> dict[str, Any]:
    """256 at once, more than the KV blocks hold."""
    asked = bodies("overload", 256, 2 * ANSWER)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    reads = await asyncio.gather(*(read(fleet, body) for body in asked))
    found = figures(reads, loop.time() - began_s, 2 * ANSWER)
    return {
        "at_once": 256,
        **found,
        "scheduler": await fleet.measured(),
        "executor": await executor_status(fleet),
        "judged_by": await judging(fleet),
    }


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

    def __init__(self, folder: str, chat_modes: Sequence[str]) -> None:
        self._chat_modes = chat_modes
        self._base = env_of(
            backend="dummy", model=folder, model_name=MODEL, device="cuda", dtype="bf16", max_context=8192,
            slots=256, l1="off", log_level="info", slo=NO_BOUNDS,
        )  # fmt: skip

    def start(self, **settings: object) -> AbstractAsyncContextManager[Served]:
        """A fleet with these settings beside its own."""
        return served(self._base | env_of(**settings))

    async def part(self, name: str, sizes: Sequence[int]) -> dict[str, Any]:
        """What one part of the command line finds."""
        if name == "decode":
            async with self.start(step_tokens=4096) as fleet:
                return {name: await decode(fleet)}
        if name == "short":
            found: dict[str, Any] = {}
            for overlap in ("run_ahead", "auto"):
                async with self.start(overlap=overlap, step_tokens=4096) as fleet:
                    found[overlap] = await decode(fleet, SHORT)
            return {name: found}
        if name == "loops":
            return {f"step_tokens_{size}": await self._loops(size) for size in sizes}
        if name in ("defaults", "unequal"):
            return {name: await self._loops(make=unequal if name == "unequal" else equal)}
        if name == "overload":
            return {name: {kv: await self._overload(kv, sizes[0]) for kv in ("on_demand", "foreseen")}}
        if name == "overhead":
            return {name: [await self._overhead(sizes[0]) for _ in range(OVERHEAD_ROUNDS)]}
        if name == "multi_turn":
            return {name: {mode: await self._chats(mode, sizes[-1]) for mode in self._chat_modes}}
        if name == "modes":
            return {name: await by_mode(self.start)}
        raise ValueError(f"there is no part {name!r}: {PARTS}")

    async def _overload(self, kv: str, step_tokens: int) -> dict[str, Any]:
        tiers = {"kv_blocks": KV_BLOCKS, "l1": L1_MIB, "policy": f"reservation={kv}"}
        async with self.start(**tiers, step_tokens=step_tokens) as fleet:
            await pinned(fleet)
            await fleet.all(bodies("warm-tiers", 8, 16))
            return _told(await overload(fleet))

    async def _overhead(self, step_tokens: int) -> dict[str, Any]:
        """The overload with each arm of the recompute overhead. Admission leaves nothing free for growth."""
        found = {}
        for arm in arms_of(greedy=True):
            tiers = {"l1": L1_MIB if arm.tiers else "off", "policy": arm.policy}
            async with self.start(kv_blocks=KV_BLOCKS, **tiers, step_tokens=step_tokens) as fleet:
                if arm.tiers:
                    await pinned(fleet)
                await fleet.all(bodies("warm-tiers", 8, 16))
                found[arm.name] = _told(await overload(fleet))
        return found

    async def _loops(self, step_tokens: int | None = None, make: Make = equal) -> dict[str, Any]:
        """With steps of so many tokens, or by the settings that a user gets: budget and promises follow."""
        settings = {"step_tokens": step_tokens} if step_tokens else {"slo": DEFAULT_CLASSES}
        async with self.start(**settings) as fleet:
            await fleet.all(bodies(f"warm-{step_tokens}", 8, 16))
            found = {"closed": _told(await closed_loop(fleet, make))}
            for rate, requests in ((16.0, REQUESTS), (32.0, REQUESTS if step_tokens else LONGER)):
                found[f"open_{rate:g}"] = _told(await open_loop(fleet, rate, requests, make))
            return found

    async def _chats(self, mode: str, step_tokens: int) -> dict[str, Any]:
        tiers = {"kv_blocks": KV_BLOCKS, "l1": CHATS_L1_MIB}
        async with self.start(**tiers, step_tokens=step_tokens, overlap=mode) as fleet:
            found, prompts = await multi_turn(fleet)
            _told(found)
            if mode == "auto":
                found["restores"] = _told(await restores(fleet, prompts))
            return found


async def measure(asked: argparse.Namespace) -> None:
    """The parts one after the other; what is found is written after each."""
    found: dict[str, Any] = {}
    out: Path | None = asked.out
    sizes = [int(size) for size in asked.step_tokens.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), LLAMA_8B)
        bench = Bench(folder, asked.chat_modes.split(","))
        for part in asked.parts.split(","):
            found |= await bench.part(part, sizes)
            if out is not None:
                await asyncio.to_thread(out.write_text, json.dumps(found, indent=1) + "\n")


def _told(found: dict[str, Any]) -> dict[str, Any]:
    print({k: round(v, 2) for k, v in found.items() if isinstance(v, int | float)}, flush=True)
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.gpu.serve", description=__doc__)
    parser.add_argument("--step-tokens", default="512,768,1024")
    parser.add_argument("--parts", default=PARTS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--chat-modes", default="auto,single,two_batch")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
