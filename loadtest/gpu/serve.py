"""The whole engine: services as processes over a nats-server, clients that read streams, an 8B model of
random weights on the GPU.

    python -m loadtest.gpu.serve --out docs/benchmarks/gpu_serve_h200.json
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from loadtest.fleet import MODEL
from loadtest.gpu.shape import LLAMA_8B
from loadtest.real.served import Served, env_of, served
from loadtest.real.steady import steady
from services.launcher.trace import find

NO_BOUNDS = "standard=60000/10000/60000"  # ms: prompts come in at once, whatever the steps take
BATCHES = (1, 32, 64, 128, 256)
PROMPT, ANSWER = 1024, 256
CLOSED, REQUESTS = 64, 192
L1_MIB, PIN_S = 32_768, 16.0  # of the arena, and the longest that pinning it takes


@dataclass(slots=True)
class Read:
    """When parts of an answer came, in seconds on the loop's clock."""

    sent_s: float = 0.0
    parts_s: list[float] = field(default_factory=list)


async def decode(fleet: Served) -> list[dict[str, Any]]:
    """Batches of decodes, from the scheduler's record of the steps."""
    found = []
    for batch in BATCHES:
        name = f"decode-{batch}"
        await fleet.all(_bodies(name, batch, ANSWER))
        one = await steady(fleet, f"{name}-0")
        found.append({"batch": batch, **asdict(one)})
        print(found[-1], flush=True)
    return found


async def closed_loop(fleet: Served) -> dict[str, Any]:
    """So many requests in flight until all are answered, as their readers see it."""
    bodies = iter(_bodies("closed", REQUESTS, ANSWER))
    reads: list[Read] = []
    loop = asyncio.get_running_loop()
    began_s = loop.time()

    async def worker() -> None:
        for body in bodies:
            read = await _read(fleet, body)
            reads.append(read)

    await asyncio.gather(*(worker() for _ in range(CLOSED)))
    figures = _figures(reads, loop.time() - began_s)
    seen = await find(fleet.bus, f"closed-{REQUESTS // 2}", steps=True, wait_s=5)
    return {"in_flight": CLOSED, "requests": REQUESTS, **figures, "steps_of_one": seen["steps"]}


async def open_loop(fleet: Served, rate: float) -> dict[str, Any]:
    """Poisson arrivals at `rate` a second."""
    rng = random.Random(17)
    at_s = list(itertools.accumulate(rng.expovariate(rate) for _ in range(REQUESTS)))
    loop = asyncio.get_running_loop()
    began_s = loop.time()

    async def one(at_s: float, body: dict[str, Any]) -> Read:
        await asyncio.sleep(began_s + at_s - loop.time())
        return await _read(fleet, body)

    bodies = _bodies(f"open-{rate:g}", REQUESTS, ANSWER)
    reads = await asyncio.gather(*(one(at, body) for at, body in zip(at_s, bodies, strict=True)))
    return {"rate": rate, "requests": REQUESTS, **_figures(reads, loop.time() - began_s)}


async def overload(fleet: Served) -> dict[str, Any]:
    """256 at once, more than the KV blocks hold: pauses and comebacks by way of the tiers."""
    bodies = _bodies("overload", 256, 2 * ANSWER)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    reads = await asyncio.gather(*(_read(fleet, body) for body in bodies))
    figures = _figures(reads, loop.time() - began_s, 2 * ANSWER)
    return {"at_once": 256, **figures, "scheduler": await fleet.measured()}


async def _read(fleet: Served, body: dict[str, Any]) -> Read:
    loop = asyncio.get_running_loop()
    read = Read(loop.time())
    async for frame in fleet.client.stream(body):
        if frame["type"] == "delta":
            read.parts_s.append(loop.time())
    return read


def _figures(reads: Sequence[Read], took_s: float, answer: int = ANSWER) -> dict[str, Any]:
    gaps = sorted(1e3 * (b - a) for read in reads for a, b in itertools.pairwise(read.parts_s))
    first = sorted(1e3 * (read.parts_s[0] - read.sent_s) for read in reads)
    cuts = statistics.quantiles(gaps, n=100)
    return {
        "tok_s": len(reads) * answer / took_s, "seconds": took_s, "parts": sum(len(r.parts_s) for r in reads),
        "ttft_p50_ms": statistics.median(first), "ttft_p99_ms": statistics.quantiles(first, n=100)[98],
        "itl_p50_ms": cuts[49], "itl_p90_ms": cuts[89], "itl_p99_ms": cuts[98], "itl_max_ms": gaps[-1],
    }  # fmt: skip


def _bodies(name: str, rows: int, tokens: int) -> list[dict[str, Any]]:
    rng = random.Random(name)
    return [
        {
            "model": MODEL, "prompt": [rng.randrange(300, 120_000) for _ in range(PROMPT)],
            "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "seed": i,
            "request_id": f"{name}-{i}",
        }
        for i in range(rows)
    ]  # fmt: skip


def write_model(folder: Path) -> None:
    """Shapes, and a vocabulary in which every id has a text."""
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    tokens = [*ByteLevel.alphabet()]
    tokens += [f"t{i}" for i in range(len(tokens), LLAMA_8B["vocab_size"])]
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")


async def measure(step_tokens: Sequence[int], parts: Sequence[str]) -> dict[str, Any]:
    """A fleet for each number of tokens in a step."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        base = env_of(
            backend="dummy", model=folder, model_name=MODEL, device="cuda", dtype="bf16", max_context=4096,
            slots=256, l1="off", log_level="info",
        )  # fmt: skip
        if "decode" in parts:
            async with served(base | env_of(step_tokens=4096, slo=NO_BOUNDS)) as fleet:
                found["decode"] = await decode(fleet)
        for size in step_tokens:
            async with served(base | env_of(step_tokens=size, slo=NO_BOUNDS)) as fleet:
                await fleet.all(_bodies(f"warm-{size}", 8, 16))
                found[f"step_tokens_{size}"] = here = {}
                if "closed" in parts:
                    here["closed"] = _told(await closed_loop(fleet))
                for rate in (16.0, 32.0) if "open" in parts else ():
                    here[f"open_{rate:g}"] = _told(await open_loop(fleet, rate))
        if "overload" in parts:
            tiers = env_of(kv_blocks=8192, l1=L1_MIB, step_tokens=step_tokens[0], slo=NO_BOUNDS)
            async with served(base | tiers) as fleet:
                await asyncio.sleep(PIN_S)
                await fleet.all(_bodies("warm-tiers", 8, 16))
                found["overload"] = _told(await overload(fleet))
    return found


def _told(found: Mapping[str, Any]) -> Mapping[str, Any]:
    print({k: round(v, 2) for k, v in found.items() if isinstance(v, int | float)}, flush=True)
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.gpu.serve", description=__doc__)
    parser.add_argument("--step-tokens", default="576,1088")
    parser.add_argument("--parts", default="decode,closed,open,overload")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    sizes = [int(size) for size in asked.step_tokens.split(",")]
    found = asyncio.run(measure(sizes, asked.parts.split(",")))
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
