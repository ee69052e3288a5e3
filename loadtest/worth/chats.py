"""Conversations that come back in turn, three times as many as the device holds: time to the first text of
each later turn, with L1, with L2 and without either; and prompts that nobody has seen before."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from loadtest.fleet import MODEL
from loadtest.real.report import Report
from loadtest.real.served import Body, Served, side_by_side
from loadtest.storm import WORDS
from loadtest.worth.arms import Answer, Sizes, ask, environments, remote

QUESTION_WORDS, ANSWER_TOKENS = 15, 16
TOKENS_A_WORD = 1.35  # of these words, about
BURST, BURST_TOKENS, COLD_WORDS = 3, 12, 100
ALLOWED = 1.03
Messages = list[dict[str, str]]
Answers = dict[str, Answer]
Measure = Callable[[Answer], float]


@dataclass(frozen=True, slots=True)
class Size:
    """How much is run."""

    chats: int
    turns: int
    pairs: int  # without any hit
    history_words: int
    threads: int

    @property
    def sizes(self) -> Sizes:
        """The device holds a third of all conversations, the small L1 about one and a half."""
        grown_words = self.history_words + self.turns * QUESTION_WORDS
        each = int(TOKENS_A_WORD * grown_words) + self.turns * (ANSWER_TOKENS + 10) + 32
        return Sizes(self.chats * each // 3, 2 * self.chats * each, 3 * each // 2, self.threads)


async def run(size: Size, command: str) -> Report:
    """The table of both parts."""
    report = Report(
        "kv_worth",
        "KV tiers below the device: are they worth it?",
        f"SmolLM2-135M-Instruct in float32, {size.threads} threads; a fleet of processes for each arm, asked "
        f"in turn. {size.chats} conversations of about {size.history_words} words come back "
        f"{size.turns - 1} times each, in turn; the device holds a third of them ({size.sizes.pool_tokens} "
        "tokens). *L2*: an L1 of one and a half conversations, the rest in Redis on this host. Times from "
        f"sending to the first text. Part two: bursts of {BURST} prompts that nobody has seen, from sending "
        "to the last answer: what tiers cost where they bring nothing.",
        command,
        ["what", "arm", "samples", "median ms", "least", "most", "cached % of the prompt", "none / arm"],
    )
    with remote() as l2:
        async with side_by_side(environments(size.sizes, l2)) as fleets:
            later = await _conversations(size, fleets)
            cold = await _cold(size, fleets)
    _rows(report, "later turns, first text", later, lambda answer: answer.ttft_ms)
    _rows(report, "nothing cached, burst", cold, lambda answer: answer.took_ms)
    for arm in ("L1", "L2"):
        faster = _ratio(later, arm, lambda answer: answer.ttft_ms)
        report.checks.append((f"{arm}: later turns {faster:.2f} ≥ 1 × as fast as without", faster >= 1))
        slower = 1 / _ratio(cold, arm, lambda answer: answer.took_ms)
        report.checks.append((f"{arm}: without hits {slower:.3f} ≤ {ALLOWED} × none", slower <= ALLOWED))
    report.data["later_turns"] = [{arm: asdict(a) for arm, a in pair.items()} for pair in later]
    report.data["no_hits"] = [{arm: asdict(a) for arm, a in pair.items()} for pair in cold]
    return report


async def _conversations(size: Size, fleets: Mapping[str, Served]) -> list[Answers]:
    """All first turns, then all second ones, and so on; each turn on every arm, in changing order."""
    rng, later = random.Random(1), list[Answers]()
    talks: list[Messages] = [[] for _ in range(size.chats)]
    for turn in range(size.turns):
        for number, talk in enumerate(talks):
            words = QUESTION_WORDS if turn else size.history_words
            talk.append({"role": "user", "content": " ".join(rng.choices(WORDS, k=words))})
            got = await _each(fleets, turn + number, _body(talk, ANSWER_TOKENS, f"chat-{number}-{turn}"))
            talk.append({"role": "assistant", "content": got["none"].text})
            if turn:
                later.append(got)
    return later


async def _cold(size: Size, fleets: Mapping[str, Served]) -> list[Answers]:
    rng, pairs = random.Random(2), list[Answers]()
    for pair in range(size.pairs):
        bodies = []
        for number in range(BURST):
            text = " ".join(rng.choices(WORDS, k=COLD_WORDS))
            bodies.append(_body([{"role": "user", "content": text}], BURST_TOKENS, f"cold-{pair}-{number}"))
        pairs.append(await _each(fleets, pair, *bodies))
    return pairs


async def _each(fleets: Mapping[str, Served], turn: int, *bodies: Body) -> Answers:
    """The same requests to every arm, one arm after the other; of several the one that took longest."""
    arms, got = list(fleets), Answers()
    at = turn % len(arms)
    for arm in arms[at:] + arms[:at]:
        answers = await asyncio.gather(*(ask(fleets[arm], dict(body)) for body in bodies))
        got[arm] = max(answers, key=lambda answer: answer.took_ms)
    return got


def _body(messages: Messages, tokens: int, request: str) -> Body:
    return {
        "model": MODEL, "messages": list(messages), "max_tokens": tokens, "temperature": 0,
        "ignore_eos": True, "request_id": request,
    }  # fmt: skip


def _ratio(pairs: list[Answers], arm: str, of: Measure) -> float:
    return statistics.median(of(pair["none"]) / of(pair[arm]) for pair in pairs)


def _rows(report: Report, what: str, pairs: list[Answers], of: Measure) -> None:
    for arm in pairs[0]:
        times = [of(pair[arm]) for pair in pairs]
        cached = 100 * sum(pair[arm].cached_tokens for pair in pairs)
        prompts = sum(pair[arm].prompt_tokens for pair in pairs)
        report.add(
            [what, arm, len(pairs), f"{statistics.median(times):.1f}", f"{min(times):.1f}",
             f"{max(times):.1f}", f"{cached / prompts:.1f}", f"{_ratio(pairs, arm, of):.2f}"]
        )  # fmt: skip
