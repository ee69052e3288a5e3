"""The second turn of a conversation on the real model: its prefix is in the cache. The same messages from
another tenant find nothing there, and are computed whole."""

from __future__ import annotations

import asyncio
import random
import statistics
from dataclasses import asdict, dataclass
from typing import Any

from loadtest.fleet import MODEL
from loadtest.real.report import Report
from loadtest.real.served import Body, Served, real_env, served
from loadtest.storm import WORDS
from services.launcher.commands.trace import find
from shared.client import Client

HISTORY_WORDS, ANSWER_TOKENS, ALLOWED = 400, 40, 1.25
QUESTIONS = {"a short question": 4, "a long question": 80}  # words of the second turn
Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Turn:
    """One conversation's second turn, and the same prompt cold."""

    prompt_tokens: int
    cached_tokens: int
    cold_cached_tokens: int
    warm_ms: float
    cold_ms: float
    warm_engine_ms: float  # of it, the steps with prompt tokens
    cold_engine_ms: float
    step_ms: float  # a step of one decoding row

    @property
    def bound_ms(self) -> float:
        """What the second turn may take to its first text."""
        uncached = 1 - self.cached_tokens / self.prompt_tokens
        return self.cold_ms * uncached * ALLOWED + self.step_ms


async def run(conversations: int, threads: int, command: str) -> Report:
    """The table of all conversations."""
    report = Report(
        "second_turn",
        "Second turn of a conversation, real model",
        f"SmolLM2-135M-Instruct in float32, {threads} threads, five processes and a nats-server. *cold*: the "
        "same messages from a tenant that is new, whose cache is its own. Times from sending to first text; "
        "in brackets the engine's part. The order changes with each conversation. Bound: cold × uncached "
        f"share × {ALLOWED} + one decode step.",
        command,
        ["second turn", "prompt tokens", "cached", "cold ms", "second turn ms", "step ms", "bound ms"],
    )
    async with served(real_env(threads)) as fleet:
        await _turn(fleet, 0, 4)  # to warm up
        turns = {
            name: [await _turn(fleet, at * 100 + i, words) for i in range(1, conversations + 1)]
            for at, (name, words) in enumerate(QUESTIONS.items())
        }
    for name, turn in ((name, turn) for name, of in turns.items() for turn in of):
        warm = f"{turn.warm_ms:.1f} ({turn.warm_engine_ms:.1f})"
        cold = f"{turn.cold_ms:.1f} ({turn.cold_engine_ms:.1f})"
        tail = [f"{turn.step_ms:.1f}", f"{turn.bound_ms:.1f}"]
        report.add([name, turn.prompt_tokens, turn.cached_tokens, cold, warm, *tail])
    for name, of in turns.items():
        shares = sorted(turn.warm_ms / turn.bound_ms for turn in of)
        share = statistics.median(shares)
        said = f"{name}: {share:.2f} of its bound (median; {shares[0]:.2f}–{shares[-1]:.2f})"
        report.checks.append((said, share <= 1))
    found = [turn.cold_cached_tokens for of in turns.values() for turn in of]
    report.checks.append(("nothing of the cold prompts was cached", not any(found)))
    report.data["turns"] = {name: [asdict(turn) for turn in of] for name, of in turns.items()}
    return report


async def _turn(fleet: Served, number: int, words: int) -> Turn:
    stranger = await Client.open(fleet.bus, tenant=f"stranger-{number}")
    rng = random.Random(number)
    talk = [{"role": "user", "content": " ".join(rng.choices(WORDS, k=HISTORY_WORDS))}]
    question = " ".join(rng.choices(WORDS, k=words))
    first = await fleet.client.complete(_body(talk, ANSWER_TOKENS, f"first-{number}"))
    step_ms = statistics.median((await _steps_ms(fleet, f"first-{number}"))[1])
    more = [*talk, first["choices"][0]["message"], {"role": "user", "content": question}]
    sides = [(fleet.client, "warm"), (stranger, "cold")]
    got = {
        name: await _ask(client, _body(more, 2, f"{name}-{number}"))
        for client, name in sides[:: 1 - number % 2 * 2]
    }
    usage = got["warm"][1]
    return Turn(
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=_cached(usage),
        cold_cached_tokens=_cached(got["cold"][1]),
        warm_ms=got["warm"][0],
        cold_ms=got["cold"][0],
        warm_engine_ms=sum((await _steps_ms(fleet, f"warm-{number}"))[0]),
        cold_engine_ms=sum((await _steps_ms(fleet, f"cold-{number}"))[0]),
        step_ms=step_ms,
    )


def _body(messages: Messages, tokens: int, request: str) -> Body:
    return {
        "model": MODEL, "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "request_id": request,
    }  # fmt: skip


async def _ask(client: Client, body: Body) -> tuple[float, dict[str, Any]]:
    """Milliseconds to the first text, and the usage."""
    loop = asyncio.get_running_loop()
    sent_s, first_s, usage = loop.time(), 0.0, dict[str, Any]()
    async for frame in client.stream(body):
        if frame["type"] == "delta":
            first_s = first_s or loop.time()
        elif frame["type"] == "done":
            usage = frame["usage"]
    return 1e3 * (first_s - sent_s), usage


async def _steps_ms(fleet: Served, request: str) -> tuple[list[float], list[float]]:
    """Times of the steps with prompt tokens, and of those without."""
    (steps,) = (await find(fleet.bus, request, steps=True, wait_s=5))["steps"].values()
    rows = zip(steps["prefill_tokens"], steps["forward_us"], steps["sample_us"], strict=True)
    found: tuple[list[float], list[float]] = [], []
    for prompt, forward_us, sample_us in rows:
        found[not prompt].append((forward_us + sample_us) / 1e3)
    return found


def _cached(usage: dict[str, Any]) -> int:
    return int(usage.get("prompt_tokens_details", {}).get("cached_tokens", 0))
