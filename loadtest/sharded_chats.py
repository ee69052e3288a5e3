"""Measures how much of their prompts chats find cached with two schedulers of a model, next to one.

    python -m loadtest.sharded_chats [--chats 200] [--seeds 3] [--out sharded_chats.json]

Virtual time and executors (loadtest.simulator), the real scheduler and tokenizer. 200 chats of eight turns;
each prompt repeats the turns before it. `hit_pct`: cached tokens of the prompts from the second turn on.
`by`: what requests are divided by. `id`: the request id, as before routing keys. `256 tokens`: the start of
the prompt. `chat`: the routing key of the tokenizer, which ends with the first message of the user.
Heartbeats are a second apart. `busiest_to_mean` is of the executors' time in steps.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from loadtest.fleet import cpu_name
from loadtest.sim.many_executors import conversations, workload
from loadtest.sim.scenarios import H200
from loadtest.simulator.report import percentile
from loadtest.simulator.requests import SimRequest, Workload, tokenized
from loadtest.simulator.world import FIRST_US, Setup, World
from services.scheduler.reports import status
from services.tokenizer.core import Loads, Schedulers, Send, TokenizerCore
from services.tokenizer.prepare import ROUTING_TOKENS, Prepared, ServedModel
from shared.actor.membership import Peers
from shared.messages import Accepted, Heartbeat, Ints

BEAT_US = 1_000_000
END_US = 600_000_000  # all have ended
SYSTEM_TOKENS = 2_000

Key = Callable[[SimRequest, Ints], str]  # request, prompt -> routing key


def by_id(asked: SimRequest, prompt: Ints) -> str:
    """None: the request id decides."""
    return ""


def by_start(asked: SimRequest, prompt: Ints) -> str:
    """The first tokens of the prompt."""
    return hashlib.blake2b(prompt[:ROUTING_TOKENS].tobytes(), digest_size=8).hexdigest()


def by_chat(asked: SimRequest, prompt: Ints) -> str:
    """The chat, as its first message of the user."""
    return hashlib.blake2b(asked.request.split(".")[0].encode(), digest_size=8).hexdigest()


KEYS: dict[str, Key] = {"id": by_id, "256 tokens": by_start, "chat": by_chat}


@dataclass(frozen=True)
class Arm:
    """Executors of each scheduler, and what divides the requests."""

    executors: tuple[int, ...]
    by: str


ARMS = (
    Arm((2,), "id"),
    Arm((1, 1), "id"),
    Arm((1, 1), "256 tokens"),
    Arm((1, 1), "chat"),
    Arm((3,), "id"),
    Arm((2, 1), "id"),
    Arm((2, 1), "chat"),
)


class Shards:
    """Schedulers with their executors, behind one tokenizer."""

    def __init__(self, arm: Arm, seed: int) -> None:
        self.worlds = {
            f"s{i}": World(Setup((H200,) * count, seed=seed), Workload(()))
            for i, count in enumerate(arm.executors)
        }
        for world in self.worlds.values():
            world.run()
        self._key = KEYS[arm.by]
        self._peers = Peers()
        self._tokenizer = TokenizerCore(cast("ServedModel", None))  # used for texts alone
        self._tokenizer.handle(Schedulers(tuple(self.worlds)), 0)
        self._beat()

    def run(self, requests: tuple[SimRequest, ...]) -> None:
        """All requests, to their ends."""
        beat_us = FIRST_US
        for asked in requests:
            now_us = FIRST_US + asked.arrival_us
            while beat_us < now_us:
                self._until(beat_us)
                self._beat()
                beat_us += BEAT_US
            self._until(now_us)
            self.worlds[self._choose(asked, now_us)].ask(asked)
        self._until(END_US)

    def _until(self, now_us: int) -> None:
        for world in self.worlds.values():
            world.go_until(now_us)

    def _beat(self) -> None:
        beat = Heartbeat(kind="scheduler", actor="", host_id="h", state="ready", model="m")
        for name, world in self.worlds.items():
            self._peers.update(1, replace(beat, actor=name, load=status.load(world.scheduler.state)), 0)
            for executor in world.engines:
                welcomed = replace(beat, kind="executor", actor=f"{name}.{executor}", scheduler=name)
                self._peers.update(1, welcomed, 0)
        loads = Loads(self._peers.executors_of("m"), tuple(self._peers.crowded("m")))
        self._tokenizer.handle(loads, 0)

    def _choose(self, asked: SimRequest, now_us: int) -> str:
        message = tokenized(asked, now_us)
        message = replace(message, routing_key=self._key(asked, message.tokens))
        (sent,) = self._tokenizer.handle(Prepared(message.inbox, message.request, message), now_us)
        assert isinstance(sent, Send)
        self._tokenizer.handle(Accepted(tenant=message.tenant, request=message.request, attempt=1), now_us)
        return sent.scheduler


def figures(arm: Arm, chats: int, seed: int, system: int) -> dict[str, float]:
    """One run."""
    requests = workload(conversations(seed, chats, system=system)).requests
    shards = Shards(arm, seed)
    shards.run(requests)
    records = [record for world in shards.worlds.values() for record in world.readers.records]
    assert len(records) == len(requests)
    assert all(record.served for record in records)
    later = [record for record in records if not record.asked.request.endswith(".0")]
    busy = [engine.totals.busy_us for world in shards.worlds.values() for engine in world.engines.values()]
    ttft = sorted(record.ttft_us for record in records)
    return {
        "hit_pct": 100 * sum(r.cached_tokens for r in later) / sum(r.prompt_tokens for r in later),
        "ttft_ms_p50": percentile(ttft, 50) / 1e3,
        "ttft_ms_p99": percentile(ttft, 99) / 1e3,
        "busiest_to_mean": max(busy) * len(busy) / sum(busy),
    }


def main() -> None:
    """Print the table, write the document."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chats", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for system in (0, SYSTEM_TOKENS):
        for arm in ARMS:
            runs = [figures(arm, options.chats, seed, system) for seed in range(options.seeds)]
            mean = {name: round(statistics.mean(run[name] for run in runs), 2) for name in runs[0]}
            rows.append({"system_tokens": system, "executors": arm.executors, "by": arm.by, **mean})
            print(json.dumps(rows[-1]), flush=True)
    if options.out:
        about = {"chats": options.chats, "seeds": options.seeds, "cpu": cpu_name()}
        options.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
