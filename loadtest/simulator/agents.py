"""Programs of agents in a virtual world: chains of prompts that extend each other, with pauses between them.

    program   first prompt ▸ answer that calls a tool ▸ pause ▸ prompt + answer + result ▸ ... ▸ last answer
    chat      one prompt that shares nothing

A closed loop: as one program ends, the next begins. Chats arrive by themselves while any program lives.
All that a program does is drawn from the seed and its number alone, so every arm sees the same programs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from loadtest.simulator.readers import Record
from loadtest.simulator.report import Figures, percentile
from loadtest.simulator.requests import STOP_ID, TEXT_ID, SimRequest, Workload
from loadtest.simulator.world import Setup, World
from services.scheduler.state.requests import Event
from shared.messages import Ints, ints

SECOND_US = 1_000_000
SYSTEM_TOKENS, SUMMARY_TOKENS = 6_000, 4_000
ANSWER_MOST, MAX_TOKENS = 2_000, 2_048
STAGGER_US = 500_000  # between the first programs
TENANTS = ("agents0", "agents1")
CHATS, LIARS = "chats", "liars"


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Draws with this median, between two bounds."""

    median: float
    sigma: float
    least: float
    most: float

    def draw(self, rng: random.Random) -> int:
        """One value, whole."""
        return int(min(max(rng.lognormvariate(math.log(self.median), self.sigma), self.least), self.most))


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that answers may call: its share of all calls, per mille, and how long it runs, us."""

    name: str
    share_pm: int
    pause: LogNormal


def _tool(name: str, share_pm: int, median_s: float) -> Tool:
    return Tool(name, share_pm, LogNormal(median_s * 1e6, 0.9, 1e5, 6e7))


PAUSES = {
    "mix": (_tool("read", 550, 0.15), _tool("shell", 300, 2), _tool("test", 120, 15), _tool("build", 30, 40)),
    "fast": (_tool("read", 860, 0.25), _tool("shell", 90, 3), _tool("test", 50, 20)),
}
TURNS = LogNormal(8.5, 0.45, 3, 20)
SUB_TURNS = LogNormal(3.2, 0.35, 2, 5)
FIRST = LogNormal(1_900, 0.35, 300, 6_000)
RESULT = LogNormal(1_500, 0.92, 20, 12_000)
ANSWER = LogNormal(220, 0.74, 10, ANSWER_MOST)
CHAT_PROMPT = LogNormal(700, 0.7, 20, 8_000)
CHAT_ANSWER = LogNormal(200, 0.7, 5, ANSWER_MOST)
LIE = LogNormal(8_000, 0.3, 4_000, 16_000)


@dataclass(frozen=True, slots=True)
class Load:
    """What the agents of a run do."""

    programs: int
    at_once: int
    pauses: str = "mix"
    chats_s: float = 0.0  # a second
    turns: LogNormal = TURNS  # of a program
    first: LogNormal = FIRST  # tokens of its first message
    answer: LogNormal = ANSWER  # tokens
    compact_at: int = 48_000  # tokens above which a history becomes a summary
    compact_every: int = 0  # turns after which it does in any case; 0: none
    sub_agents: bool = True
    ids: bool = False  # clients name their sessions
    liars_s: float = 0.0  # requests a second of a tenant whose answers call tools, and that never returns
    liars_hint: bool = False  # it asks for all that a hint can ask for


@dataclass(slots=True)
class Turn:
    """One request of a chain, and what comes after it."""

    answer_tokens: int
    tool: str
    pause_us: int
    result_tokens: int
    sub: list[Turn] = field(default_factory=list)  # the tool is an agent of its own, with these turns


@dataclass(slots=True)
class Chain:
    """A program or a sub-agent, and how far it is."""

    name: str
    tenant: str
    turns: list[Turn]
    prompt: Ints
    known: int = 0  # tokens of the prompt that were computed before
    at: int = 0
    parent: Chain | None = None
    began_us: int = 0

    @property
    def turn(self) -> Turn:
        return self.turns[self.at]

    @property
    def is_last(self) -> bool:
        return self.at == len(self.turns) - 1


class AgentWorld(World):
    """A world of agents. `figures_of` reads it after `run`."""

    def __init__(self, setup: Setup, load: Load) -> None:
        super().__init__(setup, Workload(()))
        self.load, self.programs_us, self.needed_tokens, self.live = load, list[int](), 0, 0
        self.chains: dict[str, Chain] = {}  # by request
        self.systems: dict[str, Ints] = {
            tenant: _text(at + 1, SYSTEM_TOKENS) for at, tenant in enumerate(TENANTS)
        }
        self._begun, self._segments, self._others = 0, 100, random.Random(f"{setup.seed} chats")
        self._seen: set[str] = set()  # tenants whose system prompt was computed
        for number in range(load.at_once):
            self._begin_program(number * STAGGER_US)
        self._next_other(CHATS, load.chats_s)
        self._next_other(LIARS, load.liars_s)

    def _prepared(self, event: Event | SimRequest) -> Event:
        if isinstance(event, SimRequest):
            chain = self.chains.get(event.request)
            if chain is None:
                self._next_other(
                    event.tenant, self.load.chats_s if event.tenant == CHATS else self.load.liars_s
                )
            elif not chain.began_us:
                chain.began_us = self.now_us
            self._count_needed(event, chain)
        return super()._prepared(event)

    def _count_needed(self, asked: SimRequest, chain: Chain | None) -> None:
        """Add the prompt tokens that no cache of any size could have."""
        assert not callable(asked.prompt)
        size, known = self.setup.machines[0].block_tokens, 0
        if chain is not None:
            known = chain.known or (SYSTEM_TOKENS if asked.tenant in self._seen else 0)
            self._seen.add(asked.tenant)
        length = len(asked.prompt)
        self.needed_tokens += length - min(known, length - 1) // size * size

    def _choice_ended(self, record: Record) -> None:
        super()._choice_ended(record)
        chain = self.chains.pop(record.asked.request, None)
        if chain is None:
            return
        turn = chain.turn
        chain.prompt.extend(_answer(record.tokens))
        chain.known = len(chain.prompt) - 1
        if chain.is_last:
            self._ended(chain)
        elif turn.sub:
            sub = Chain(
                f"{chain.name}.{chain.at}",
                chain.tenant,
                turn.sub,
                self.systems[chain.tenant][:],
                parent=chain,
            )
            sub.prompt.extend(self._segment(turn.result_tokens))
            self._ask(sub, self.now_us)
        else:
            self._go_on(chain, self.now_us + turn.pause_us)

    def _ended(self, chain: Chain) -> None:
        """A sub-agent ends with its parent's result; a program with the next program."""
        if chain.parent is not None:
            self._go_on(chain.parent, self.now_us)
            return
        self.programs_us.append(self.now_us - chain.began_us)
        self.live -= 1
        self._begin_program(0)

    def _go_on(self, chain: Chain, at_us: int) -> None:
        """The tool has ended: the next prompt has the answer and the result, or a summary of all."""
        chain.prompt.extend(self._segment(chain.turn.result_tokens))
        chain.at += 1
        every, length = self.load.compact_every, len(chain.prompt)
        if length > self.load.compact_at or (every and chain.at % every == 0):
            summary = min(SUMMARY_TOKENS, length - SYSTEM_TOKENS)
            chain.prompt, chain.known = self.systems[chain.tenant][:], SYSTEM_TOKENS
            chain.prompt.extend(self._segment(summary))
        self._ask(chain, at_us)

    def _begin_program(self, after_us: int) -> None:
        if self._begun == self.load.programs:
            return
        self._begun += 1
        self.live += 1
        rng = random.Random(f"{self.setup.seed} {self._begun}")
        tenant = TENANTS[self._begun % len(TENANTS)]
        chain = Chain(f"p{self._begun}", tenant, _turns(rng, self.load), self.systems[tenant][:])
        chain.prompt.extend(self._segment(self.load.first.draw(rng)))
        self._ask(chain, self.now_us + after_us)

    def _ask(self, chain: Chain, at_us: int) -> None:
        session: dict[str, object] = {"has_tools": True}
        if self.load.ids:
            session |= {"session": chain.name, "session_final": chain.is_last}
            session |= {"parent": chain.parent.name} if chain.parent else {}
        asked = SimRequest(
            f"{chain.name}/{chain.at}",
            0,
            chain.prompt[:],
            chain.turn.answer_tokens,
            MAX_TOKENS,
            tenant=chain.tenant,
            session=session,
            calls=() if chain.is_last else (chain.turn.tool,),
        )
        self.chains[asked.request] = chain
        self._push(at_us, asked)

    def _next_other(self, tenant: str, rate: float) -> None:
        """The next request without a program."""
        if not rate or not self.live:
            return
        rng, lies = self._others, tenant == LIARS
        prompt = self._segment((LIE if lies else CHAT_PROMPT).draw(rng))
        asked = SimRequest(
            f"{tenant}{self._segments}",
            0,
            prompt,
            min(CHAT_ANSWER.draw(rng), int(self.load.answer.most)),
            MAX_TOKENS,
            tenant=tenant,
        )
        if lies:
            hints = {"keep_us": 86_400 * SECOND_US, "prefetch": True, "session": asked.request}
            session = {"has_tools": True} | (hints if self.load.liars_hint else {})
            asked = replace(asked, session=session, calls=("read",))
        self._push(self.now_us + int(rng.expovariate(rate) * SECOND_US), asked)

    def _segment(self, tokens: int) -> Ints:
        """Tokens that no other segment has."""
        self._segments += 1
        return _text(self._segments, tokens)


def _text(number: int, tokens: int) -> Ints:
    return ints([number]) * tokens


def _answer(tokens: int) -> Ints:
    """As the virtual engine writes it."""
    answer = ints([TEXT_ID]) * tokens
    answer[-1] = STOP_ID
    return answer


def _turns(rng: random.Random, load: Load) -> list[Turn]:
    turns = list(_some(rng, load, load.turns.draw(rng)))
    for turn in turns[:-1]:
        if rng.randrange(12) == 0 and load.sub_agents:
            turn.sub, turn.tool = list(_some(rng, load, SUB_TURNS.draw(rng))), "agent"
    return turns


def _some(rng: random.Random, load: Load, count: int) -> Iterator[Turn]:
    tools = PAUSES[load.pauses]
    for _ in range(count):
        (tool,) = rng.choices(tools, [tool.share_pm for tool in tools])
        yield Turn(load.answer.draw(rng), tool.name, tool.pause.draw(rng), RESULT.draw(rng))


def figures_of(world: AgentWorld) -> Figures:
    """The row of a run that has ended."""
    records = world.readers.records
    lost = [record.asked.request for record in records if not record.served]
    assert not lost, f"requests were not served: {lost[:8]}"
    turns = [
        record
        for record in records
        if "/" in record.asked.request and not record.asked.request.endswith("/0")
    ]
    ttft_us = sorted(record.ttft_us for record in turns)
    chats_us = sorted(record.ttft_us for record in records if record.asked.tenant == CHATS)
    programs_us = sorted(world.programs_us)
    computed = sum(engine.totals.prefill_tokens for engine in world.engines.values())
    copies = [engine.copies for engine in world.engines.values()]
    counters = world.scheduler.state.counters
    return {
        "programs": len(programs_us),
        "program_s_mean": round(_mean(programs_us) / 1e6, 2),
        "program_s_p95": round(percentile(programs_us, 95) / 1e6, 2),
        "ttft_ms_mean": round(_mean(ttft_us) / 1e3, 1),
        "ttft_ms_p50": round(percentile(ttft_us, 50) / 1e3, 1),
        "ttft_ms_p95": round(percentile(ttft_us, 95) / 1e3, 1),
        "recomputed": computed - world.needed_tokens,
        "needed": world.needed_tokens,
        "chats_ttft_s_p95": round(percentile(chats_us, 95) / 1e6, 2),
        "down_gb": round(sum(c.stored_bytes for c in copies) / 1e9, 1),
        "up_gb": round(sum(c.loaded_bytes for c in copies) / 1e9, 1),
        "dropped_blocks": counters.dropped_blocks,
        "preemptions": counters.preemptions,
        "evicted_l1": world.tier.tier.moved.evicted_blocks if world.tier is not None else 0,
        "makespan_s": round((max(record.ended_us for record in records) - SECOND_US) / 1e6, 1),
    }


def _mean(values: list[int]) -> float:
    return sum(values) / max(len(values), 1)
