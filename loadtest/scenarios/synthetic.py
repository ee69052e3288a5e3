"""Random workloads. Every draw comes from one seeded generator: same seed, same requests."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from loadtest.bench.workloads import LogNormal
from loadtest.simulator.requests import SimRequest, Workload, plain_prompt

SECOND_US = 1_000_000
ALONE_US = 70 * SECOND_US  # `beside_batch`: nothing of class batch before


@dataclass(frozen=True)
class Mix:
    """Poisson arrivals of bursts at `rate` requests a second; lengths are log-normal."""

    requests: int
    rate: float
    prompt: LogNormal
    output: LogNormal
    max_tokens: int
    burst: int = 1
    slo_class: str = "standard"


REASONING = Mix(150, 1.2, LogNormal(400, 0.5, 2_000), LogNormal(2_000, 0.6, 8_000), max_tokens=8_192)
CHAT = Mix(600, 8.0, LogNormal(1_500, 0.8, 8_000), LogNormal(250, 0.7, 2_000), max_tokens=2_048, burst=30)
INTERACTIVE = replace(CHAT, requests=300, rate=3.0, slo_class="interactive")


def batch(
    rows: int,
    context: int,
    output: int,
    *,
    max_tokens: int = 0,
    host_fed: bool = False,
    slo_class: str = "batch",
) -> Workload:
    """`rows` equal requests at once: a steady decode batch. They end by length, or with `max_tokens` by a
    stop id, which the scheduler cannot know before."""
    return Workload(
        tuple(
            SimRequest(
                request=f"r{number}",
                arrival_us=0,
                prompt=plain_prompt(number, context),
                output_tokens=output,
                max_tokens=max_tokens or output,
                slo_class=slo_class,
                host_fed=host_fed,
            )
            for number in range(1, rows + 1)
        )
    )


def reasoning(seed: int) -> Workload:
    """A: short prompts, long answers, at a rate that the memory cannot hold."""
    return _mixed(seed, REASONING)


def chat(seed: int) -> Workload:
    """B, D, E, F: bursts of 30 chats with longer prompts."""
    return _mixed(seed, CHAT)


def contexts(seed: int) -> Workload:
    """200 batch jobs with prompts of 100 to 32,000 tokens, evenly by their logarithm, and answers of 500 to
    3,000, beside the bursts of B as interactive requests."""
    rng = random.Random(seed)
    jobs = [
        SimRequest(
            request=f"job{number}",
            arrival_us=0,
            prompt=plain_prompt(number, int(100 * 320 ** rng.random())),
            output_tokens=rng.randrange(500, 3_000),
            max_tokens=4_096,
            slo_class="batch",
        )
        for number in range(1, 201)
    ]
    return Workload((*jobs, *_mixed(seed + 1, INTERACTIVE).requests))


def batch_beside_interactive(seed: int) -> Workload:
    """C: 50 batch jobs on long texts that want twice the memory, and in the first half of their time the
    bursts of B as interactive requests."""
    rng = random.Random(seed)
    jobs = [
        SimRequest(
            request=f"job{number}",
            arrival_us=0,
            prompt=plain_prompt(number, rng.randrange(12_000, 20_000)),
            output_tokens=rng.randrange(2_000, 4_000),
            max_tokens=4_096,
            slo_class="batch",
        )
        for number in range(1, 51)
    ]
    return Workload((*jobs, *_mixed(seed + 1, INTERACTIVE).requests))


def beside_batch(seed: int) -> Workload:
    """Interactive requests with nothing beside them, then the same beside class batch, which has a row for
    every slot and more that wait: one request at a time, and bursts of 16 in one instant."""
    rng, requests = random.Random(seed), list[SimRequest]()
    for beside, start_us in (("alone", SECOND_US), ("beside", ALONE_US)):
        at_us = start_us + 2 * SECOND_US
        for number in range(30):
            for case, size in (("one", 1), ("burst", 16)):
                at_us += SECOND_US + rng.randrange(SECOND_US // 10)
                requests += [
                    SimRequest(
                        request=f"{case}_{beside}_{number}_{i}",
                        arrival_us=at_us,
                        prompt=plain_prompt(100_000 + len(requests) + i, 30),
                        output_tokens=20,
                        max_tokens=20,
                        slo_class="interactive",
                    )
                    for i in range(size)
                ]
    requests += [
        SimRequest(f"job{n}", ALONE_US, plain_prompt(n, 100), 200 + n % 200, 400, slo_class="batch")
        for n in range(1, 901)
    ]
    return Workload(tuple(sorted(requests, key=lambda asked: asked.arrival_us)))


def two_clients(seed: int) -> Workload:
    """30 s in which one client sends ten times as fast as the other, both faster than a fair share is
    served."""
    rng = random.Random(seed)
    requests: list[SimRequest] = []
    for tenant, every_us in (("greedy", SECOND_US // 100), ("modest", SECOND_US // 10)):
        for number, at_us in enumerate(range(0, 30 * SECOND_US, every_us), 1):
            requests.append(
                SimRequest(
                    request=f"{tenant}{number}",
                    arrival_us=at_us,
                    prompt=plain_prompt(len(requests) + 1, rng.randrange(1_500, 2_500)),
                    output_tokens=rng.randrange(150, 250),
                    max_tokens=256,
                    tenant=tenant,
                )
            )
    return Workload(tuple(sorted(requests, key=lambda asked: asked.arrival_us)))


def long_prompt(prompt: int, slo_class: str) -> Workload:
    """32 decodes, and from the second second on a long prompt every 400 ms in the midst of them."""
    decodes = [
        SimRequest(f"d{number}", 0, plain_prompt(number, 500), 1_500, 1_500, slo_class=slo_class)
        for number in range(1, 33)
    ]
    long = [
        SimRequest(f"p{number}", (8 + 4 * number) * SECOND_US // 10, plain_prompt(100 + number, prompt), 8, 8)
        for number in range(1, 17)
    ]
    return Workload((*decodes, *long))


def _mixed(seed: int, mix: Mix) -> Workload:
    rng = random.Random(seed)
    made, at_us = [], 0
    for number in range(1, mix.requests + 1):
        if (number - 1) % mix.burst == 0:
            at_us += int(rng.expovariate(mix.rate / mix.burst) * SECOND_US)
        made.append(
            SimRequest(
                request=f"{mix.slo_class[0]}{number}",
                arrival_us=at_us,
                prompt=plain_prompt(10_000 + number, _length(rng, mix.prompt)),
                output_tokens=_length(rng, mix.output),
                max_tokens=mix.max_tokens,
                slo_class=mix.slo_class,
            )
        )
    return Workload(tuple(made))


def _length(rng: random.Random, lengths: LogNormal) -> int:
    return max(int(lengths.draw(rng)), 1)
