"""Conversations that come back in turn, three times as many as the device holds: time to the first text of
each later turn, with L1, with L2 and without either; and prompts that nobody has seen before."""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from loadtest.fleet import MODEL
from loadtest.real.report import Report
from loadtest.real.served import ANSWER_S, Body, Served, side_by_side
from loadtest.sim import plots
from loadtest.storm import WORDS
from loadtest.worth.arms import Answer, Sizes, ask, environments, remote
from shared.client import ask_all
from shared.nats import subjects

QUESTION_WORDS, ANSWER_TOKENS = 15, 16
TOKENS_A_WORD = 1.35  # of these words, about
BURST, BURST_TOKENS, COLD_TOKENS = 3, 12, 160
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
        """The device holds a third of all conversations, the small L1 three."""
        grown_words = self.history_words + self.turns * QUESTION_WORDS
        each = int(TOKENS_A_WORD * grown_words) + self.turns * (ANSWER_TOKENS + 10) + 32
        return Sizes(self.chats * each // 3, 2 * self.chats * each, 3 * each, self.threads)


async def run(size: Size, command: str) -> Report:
    """The table of both parts."""
    report = Report(
        "kv_worth",
        "KV tiers below the device: are they worth it?",
        f"SmolLM2-135M-Instruct in float32, {size.threads} threads; a fleet of processes for each arm, asked "
        f"in turn. {size.chats} conversations of about {size.history_words} words come back "
        f"{size.turns - 1} times each, in turn; the device holds a third of them ({size.sizes.pool_tokens} "
        "tokens). *L2*: an L1 of three conversations above Redis on this host. Times from "
        f"sending to the first text. Part two: bursts of {BURST} prompts that nobody has seen, from sending "
        "to the last answer: what tiers cost where they bring nothing.",
        command,
        ["what", "arm", "samples", "median ms", "least", "most", "cached % of the prompt", "none / arm"],
    )
    later, cold = list[Answers](), list[Answers]()
    try:
        with remote() as l2:
            async with side_by_side(environments(size.sizes, l2)) as fleets:
                await _conversations(size, fleets, later)
                report.data["kv_offload"] = await _stores(fleets)
                await _cold(size, fleets, cold)
    except asyncio.CancelledError:  # Ctrl-C: what there is
        report.text += " **Stopped early.**"
    if later:
        _rows(report, "later turns, first text", later, _ttft_ms)
    if cold:
        _rows(report, "nothing cached, burst", cold, _took_ms)
    for arm in ("L1", "L2"):
        if later:
            faster = _ratio(later, arm, _ttft_ms)
            report.checks.append((f"{arm}: later turns {faster:.2f} ≥ 1 × as fast as without", faster >= 1))
        if cold:
            slower = 1 / _ratio(cold, arm, _took_ms)
            report.checks.append((f"{arm}: without hits {slower:.3f} ≤ {ALLOWED} × none", slower <= ALLOWED))
    report.data["later_turns"] = [{arm: asdict(a) for arm, a in pair.items()} for pair in later]
    report.data["no_hits"] = [{arm: asdict(a) for arm, a in pair.items()} for pair in cold]
    return report


def draw(report: Report, path: Path) -> None:
    """The time to the first text of each later turn."""
    turns = report.data["later_turns"]
    if turns:
        series = {
            arm: [(float(number), pair[arm]["ttft_ms"]) for number, pair in enumerate(turns, 1)]
            for arm in turns[0]
        }
        plots.scatter(report.title, series, ("later turn", "ms to the first text"), path)


async def _stores(fleets: Mapping[str, Served]) -> dict[str, list[dict[str, object]]]:
    """What each arm's kv_offload says of itself after the conversations."""
    return {
        arm: [a for a in await ask_all(fleet.bus, subjects.STATUS, ANSWER_S) if a["kind"] == "kv_offload"]
        for arm, fleet in fleets.items()
    }


async def _conversations(size: Size, fleets: Mapping[str, Served], later: list[Answers]) -> None:
    """All first turns, then all second ones, and so on; each turn on every arm, in changing order."""
    rng = random.Random(1)
    talks: list[Messages] = [[] for _ in range(size.chats)]
    for turn in range(size.turns):
        for number, talk in enumerate(talks):
            words = QUESTION_WORDS if turn else size.history_words
            talk.append({"role": "user", "content": " ".join(rng.choices(WORDS, k=words))})
            got = await _each(
                fleets, turn + number, _asking(ANSWER_TOKENS, f"chat-{number}-{turn}", messages=list(talk))
            )
            talk.append({"role": "assistant", "content": got["none"].text})
            _say(f"turn {turn + 1} of chat {number + 1}", got, _ttft_ms)
            if turn:
                later.append(got)


async def _cold(size: Size, fleets: Mapping[str, Served], pairs: list[Answers]) -> None:
    rng = random.Random(2)
    for pair in range(size.pairs):
        bodies = []
        for number in range(BURST):
            ids = [rng.randrange(300, 40_000) for _ in range(COLD_TOKENS)]
            bodies.append(_asking(BURST_TOKENS, f"cold-{pair}-{number}", prompt=ids))
        pairs.append(await _each(fleets, pair, *bodies))
        _say(f"burst {pair + 1}", pairs[-1], _took_ms)


async def _each(fleets: Mapping[str, Served], turn: int, *bodies: Body) -> Answers:
    """The same requests to every arm, one arm after the other; of several the one that took longest."""
    arms, got = list(fleets), Answers()
    at = turn % len(arms)
    for arm in arms[at:] + arms[:at]:
        answers = await asyncio.gather(*(ask(fleets[arm], dict(body)) for body in bodies))
        got[arm] = max(answers, key=lambda answer: answer.took_ms)
    return got


def _asking(tokens: int, request: str, **what: object) -> Body:
    return {
        "model": MODEL, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "request_id": request,
        **what,
    }  # fmt: skip


def _ttft_ms(answer: Answer) -> float:
    return answer.ttft_ms


def _took_ms(answer: Answer) -> float:
    return answer.took_ms


def _say(what: str, got: Answers, of: Measure) -> None:
    """Progress, for who waits."""
    times = ", ".join(f"{arm} {of(answer):.0f} ms" for arm, answer in got.items())
    print(f"{what}: {times}", file=sys.stderr, flush=True)


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
