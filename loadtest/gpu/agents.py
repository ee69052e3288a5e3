"""Agents with real pauses on a GPU, through `headrace up` and HTTP: how long does a program take?

    python -m loadtest.gpu.agents --arms learned,off --chats-per-s 3 --out agents.json
    python -m loadtest.gpu.agents --arms before,learned --before TREE -- --kv-blocks 12500

A program is one task of an agent: its context grows by an answer and a tool's result in each turn, and it
pauses while the tool runs. All programs begin within a few seconds; the arm ends with the last of them. Two
tenants have the programs, a third one sends chats that share nothing. Prompts are token ids, and answers go
into the next prompt as they came. No request has a hint. The device holds a third of all contexts, L1 all of
them. Each arm is a fleet of its own: `learned` and `off` are policies of this build, `before` is a checkout.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest.bench.http_pool import Address, Pool
from loadtest.bench.pacer import Pacer
from loadtest.bench.sse import DONE, Events
from loadtest.command_line import parser_of, report
from loadtest.fleet import MODEL, Fleet, connected, machine, running_up
from loadtest.gpu.readers import FIRST_ID, LAST_ID, some_tokens
from loadtest.gpu.serve import write_model
from loadtest.gpu.shape import LLAMA_8B
from shared.processes import bind

TENANTS = ("agents0", "agents1", "chats")
SYSTEM, MOST_RESULT = 6_000, 12_000  # tokens
FIRST, RESULT, ANSWER = 2_000, 1_500, 220  # medians
TURNS, MOST_TURNS, MOST_CONTEXT = 8, 20, 48_000
CHAT, CHAT_ANSWER = 700, 200
PAUSES = {  # share, median s
    "mix": ((0.55, 0.15), (0.30, 2.0), (0.12, 15.0), (0.03, 40.0)),
    "fast": ((0.86, 0.25), (0.09, 3.0), (0.05, 20.0)),
}  # fmt: skip
BEGIN_S, LIMIT_S, L1_WAITS = 4.0, 600.0, 90  # the last: of a second
_PART = re.compile(r"t(\d+)|.", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens that its prompt adds, tokens that it generates, and the pause after it."""

    added: int
    answer: int
    pause_s: float


@dataclass(frozen=True, slots=True)
class Program:
    """One task: its tenant, when it begins, and its turns."""

    tenant: int
    begin_s: float
    turns: tuple[Turn, ...]


def programs(seed: int, count: int, pauses: str, scale: float) -> list[Program]:
    """The same ones for a seed. `scale`: of all lengths of contexts."""
    rng = random.Random(f"programs-{seed}")
    return [_program(rng, number, pauses, scale) for number in range(count)]


def _program(rng: random.Random, number: int, pauses: str, scale: float) -> Program:
    turns, context = list[Turn](), SYSTEM * scale
    wanted = max(3, min(MOST_TURNS, round(rng.lognormvariate(0, 0.6) * TURNS)))
    for at in range(wanted):
        median = RESULT if at else FIRST
        added = max(16, round(scale * min(MOST_RESULT, rng.lognormvariate(0, 0.9) * median)))
        answer = max(16, min(1_000, round(rng.lognormvariate(0, 0.7) * ANSWER)))
        kinds = PAUSES[pauses]
        (_, median_s), *_ = rng.choices(kinds, [share for share, _ in kinds])
        pause_s = min(60.0, max(0.1, rng.lognormvariate(0, 0.5) * median_s))
        context += added + answer
        if context > MOST_CONTEXT * scale and turns:
            break
        turns.append(Turn(added, answer, pause_s))
    return Program(number % 2, rng.uniform(0, BEGIN_S), tuple(turns))


@dataclass(slots=True)
class Seen:
    """What clients saw, in seconds."""

    programs_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)  # TTFT of first turns
    next_s: list[float] = field(default_factory=list)  # of continuations
    chats_s: list[float] = field(default_factory=list)
    generated: int = 0
    prompt: int = 0
    cached: int = 0
    errors: list[str] = field(default_factory=list)


class Asker:
    """Sends completions of one tenant."""

    def __init__(self, url: str, key: str, pacer: Pacer, seen: Seen) -> None:
        self._pool, self._seen = Pool(Address.of(url), pacer, key), seen

    async def ask(self, prompt: list[int], tokens: int) -> tuple[list[int], float]:
        """The answer's ids and the time to its first token."""
        body = {
            "model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 1.0,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        events, text, first_s, began_s, refused = Events(), "", 0.0, time.monotonic(), b""

        def on_body(status: int, data: bytes, now_us: int) -> None:
            nonlocal text, first_s, refused
            if status != 200:
                refused += data
                return
            for event in events.feed(data):
                if event == DONE:
                    continue
                read = json.loads(event)
                if read.get("choices") and (part := read["choices"][0]["text"]):
                    first_s = first_s or time.monotonic() - began_s
                    text += part
                if usage := read.get("usage"):
                    self._seen.prompt += usage["prompt_tokens"]
                    self._seen.generated += usage["completion_tokens"]
                    self._seen.cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)

        async with asyncio.timeout(LIMIT_S):
            status = await self._pool.ask("POST", "/v1/completions", body, on_body)
        if status != 200 or not text:
            self._seen.errors.append(f"{status} {refused[:200]!r}")
        return ids_of(text), first_s


def ids_of(text: str) -> list[int]:
    """The ids whose texts it is. A digit after an id is an id of its own where the number would be too high;
    elsewhere it is read as a part of the number."""
    ids = list[int]()
    for found in _PART.finditer(text):
        number = found[1] or ""
        digits = len(number)
        while digits and int(number[:digits]) > LAST_ID:
            digits -= 1
        ids += [int(number[:digits])] if digits else [ord(found[0][0])]
        ids += map(ord, number[digits:])
    return ids


async def run_program(asker: Asker, program: Program, shared: list[int], number: int, seen: Seen) -> None:
    """One program from its first turn to its last answer."""
    rng = random.Random(f"texts-{number}")
    await asyncio.sleep(program.begin_s)
    began_s, context = time.monotonic(), list(shared)
    for at, turn in enumerate(program.turns):
        context += some_tokens(rng, turn.added)
        answer, first_s = await asker.ask(context, turn.answer)
        (seen.next_s if at else seen.first_s).append(first_s)
        context += answer
        if at + 1 < len(program.turns):
            await asyncio.sleep(turn.pause_s)
    seen.programs_s.append(time.monotonic() - began_s)


async def run_chats(asker: Asker, rate: float, seen: Seen, seed: int) -> None:
    """Chats by a Poisson process, until cancelled."""
    rng = random.Random(f"chats-{seed}")

    async def chat(prompt: list[int], tokens: int) -> None:
        _, first_s = await asker.ask(prompt, tokens)
        seen.chats_s.append(first_s)

    async with asyncio.TaskGroup() as group:
        for _ in itertools.count():
            await asyncio.sleep(rng.expovariate(rate))
            prompt = some_tokens(rng, min(8_000, round(rng.lognormvariate(0, 0.6) * CHAT)))
            group.create_task(chat(prompt, min(1_000, round(rng.lognormvariate(0, 0.6) * CHAT_ANSWER) + 1)))


async def arm(url: str, pid: int, nats: str, given: argparse.Namespace) -> dict[str, Any]:
    """What one fleet does with the load."""
    seen, pacer = Seen(), Pacer()
    askers = [Asker(url, f"key-{tenant}", pacer, seen) for tenant in TENANTS]
    rng = random.Random(f"shared-{given.seed}")
    shared = [some_tokens(rng, round(SYSTEM * given.scale)) for _ in range(2)]
    todo = programs(given.seed, given.programs, given.pauses, given.scale)
    async with connected(nats) as client:
        fleet = Fleet(pid, nats, client)
        for _ in range(L1_WAITS):
            if (await fleet.executor()).get("arena_generation"):
                break
            await asyncio.sleep(1)
        warm = Asker(url, f"key-{TENANTS[2]}", pacer, Seen())
        await asyncio.gather(*(warm.ask(some_tokens(rng, 512), 16) for _ in range(16)))
        before = await fleet.executor()
        began_s = time.monotonic()
        chats = asyncio.create_task(run_chats(askers[2], given.chats_per_s, seen, given.seed))
        await asyncio.gather(
            *(run_program(askers[p.tenant], p, shared[p.tenant], n, seen) for n, p in enumerate(todo))
        )
        took_s = time.monotonic() - began_s
        chats.cancel()
        await asyncio.gather(chats, return_exceptions=True)
        after, scheduler = await fleet.executor(), await fleet.scheduler()
    computed = after.get("prefilled_tokens", 0) - before.get("prefilled_tokens", 0)
    return {**figures(seen, took_s), "computed_prompt_tokens": computed, "scheduler": scheduler}


def figures(seen: Seen, took_s: float) -> dict[str, Any]:
    """The summary of an arm."""
    return {
        "seconds": round(took_s, 2),
        "program_mean_s": round(statistics.mean(seen.programs_s), 2),
        "program_p95_s": round(quantile(seen.programs_s, 0.95), 2),
        "ttft_first_p50_ms": round(1e3 * quantile(seen.first_s, 0.5), 1),
        "ttft_next_mean_ms": round(1e3 * statistics.mean(seen.next_s), 1),
        "ttft_next_p50_ms": round(1e3 * quantile(seen.next_s, 0.5), 1),
        "ttft_next_p95_ms": round(1e3 * quantile(seen.next_s, 0.95), 1),
        "chats": len(seen.chats_s),
        "ttft_chats_p95_ms": round(1e3 * quantile(seen.chats_s, 0.95), 1),
        "tokens_per_s": round(seen.generated / took_s, 1),
        "prompt_tokens": seen.prompt,
        "cached_tokens": seen.cached,
        "errors": seen.errors[:5],
    }


def quantile(values: list[float], q: float) -> float:
    """The value below which the share `q` of them lies; 0.0 without any."""
    return sorted(values)[min(len(values) - 1, int(q * len(values)))] if values else 0.0


def fleets(given: argparse.Namespace, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each arm in a fleet of its own, one after the other, and what it did."""
    keys = folder / "keys"
    keys.write_text("".join(f"{tenant} key-{tenant}\n" for tenant in TENANTS))
    for number, name in enumerate(given.arms.split(",")):
        with bind("127.0.0.1", 0) as free:
            host, port = free.getsockname()[:2]
        flags = [
            "--backend", "dummy", "--model", str(folder), "--model-name", MODEL, "--device", given.device,
            "--max-context", "32768", "--no-durable", "--http", f"{host}:{port}", "--http-keys", str(keys),
            "--l1", given.l1, *(("--policy", "sessions=off") if name == "off" else ()), *given.up,
        ]  # fmt: skip
        tree = {"PYTHONPATH": given.path + str(given.before), "PYTHONSAFEPATH": "1"}
        began_s = time.monotonic()
        with running_up(flags, tree if name == "before" else {}, str(folder / f"log{number}")) as (pid, nats):
            start_s = time.monotonic() - began_s
            found = asyncio.run(arm(f"http://{host}:{port}", pid, nats, given))
        yield name, {"start_s": round(start_s, 1), **found}


def main() -> None:
    """The command line."""
    parser = parser_of("gpu.agents", __doc__, up=True)
    parser.add_argument("--arms", default="learned,off", help="of learned, off, before")
    parser.add_argument("--before", type=Path, help="a checkout of another build")
    parser.add_argument("--path", default="", help="what precedes it in PYTHONPATH, with a colon")
    parser.add_argument("--programs", type=int, default=48)
    parser.add_argument("--pauses", choices=tuple(PAUSES), default="mix")
    parser.add_argument("--chats-per-s", type=float, default=3.0)
    parser.add_argument("--scale", type=float, default=0.5, help="of the lengths of contexts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--l1", default="73728", help="MiB")
    parser.add_argument("--shape", type=Path, help="a config.json in place of that of Llama-3.1-8B")
    given = parser.parse_args()
    config = json.loads(given.shape.read_text()) if given.shape else LLAMA_8B
    assert config["vocab_size"] > FIRST_ID < LAST_ID
    found: dict[str, Any] = {"machine": machine(), "flags": given.up, "arms": []}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), config)
        for name, figures_of_arm in fleets(given, Path(folder)):
            found["arms"].append({"arm": name, **figures_of_arm})
            shown = {k: v for k, v in figures_of_arm.items() if k != "scheduler"}
            report(found, given.out, {"arm": name, **shown})


if __name__ == "__main__":
    main()
