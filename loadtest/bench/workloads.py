"""Random workloads, by name. Every draw comes from one seeded generator: same seed, same requests."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from loadtest.bench.asked import Conversation, Turn
from loadtest.bench.chats import multi_turn
from loadtest.bench.prompts import Prompts
from loadtest.bench.shape import Shape

Conversations = list[Conversation]
Workload = Callable[[Shape, Prompts], Conversations]


class LogNormal(NamedTuple):
    """Log-normal lengths, in tokens."""

    median: int
    sigma: float
    most: int

    def draw(self, rng: random.Random) -> float:
        """One length."""
        return min(self.median * math.exp(rng.gauss(0, self.sigma)), self.most)


# The means are those that the vLLM paper gives for ShareGPT (Kwon et al., SOSP 2023, fig. 11): 161 tokens of
# input and 338 of output. The sigmas are ours.
SHAREGPT_INPUT, SHAREGPT_OUTPUT = LogNormal(90, 1.08, 1_024), LogNormal(205, 1.0, 2_048)
CLASSES = ("interactive", "standard", "batch")
BATCH_TIMES = 4  # a batch request is so many times as long as an interactive one


def uniform(shape: Shape, prompts: Prompts) -> Conversations:
    """random: prompts that share nothing, but a prefix of --prefix-len where one is asked for."""
    return shared_prefix(replace(shape, prefixes=1), prompts)


def shared_prefix(shape: Shape, prompts: Prompts) -> Conversations:
    """Each prompt begins with one of `prefixes` texts and goes on by itself."""
    prefixes = [prompts.make(shape.prefix_len) for _ in range(shape.prefixes)] if shape.prefix_len else []
    turns: list[Turn] = []
    for number in range(shape.prompts):
        tokens, output = (shape.drawn(prompts.rng, n) for n in (shape.input_len, shape.output_len))
        prefix = prefixes[number % len(prefixes)] if prefixes else None
        prompt = prompts.make(tokens) if prefix is None else prompts.after(prefix, tokens)
        turns.append(Turn(prompt, output))
    return [Conversation((turn,)) for turn in turns]


def sharegpt(shape: Shape, prompts: Prompts) -> Conversations:
    """Lengths like those of ShareGPT's conversations; made up, its texts are not here."""

    def turn() -> Turn:
        tokens, output = (shape.scaled(s.draw(prompts.rng)) for s in (SHAREGPT_INPUT, SHAREGPT_OUTPUT))
        return Turn(prompts.make(tokens), output)

    return [Conversation((turn(),)) for _ in range(shape.prompts)]


def long_beside_chat(shape: Shape, prompts: Prompts) -> Conversations:
    """Short requests, and every `long_every`th a long prompt with a short answer in their midst: what it
    does to the gaps of the others is the question."""

    def turn(number: int) -> Turn:
        if number % shape.long_every == shape.long_every - 1:
            return Turn(prompts.make(shape.long_len), max(shape.output_len // 8, 1), "long")
        tokens, output = (shape.drawn(prompts.rng, n) for n in (shape.input_len, shape.output_len))
        return Turn(prompts.make(tokens), output, "short")

    return [Conversation((turn(number),)) for number in range(shape.prompts)]


def priorities(shape: Shape, prompts: Prompts) -> Conversations:
    """A third of each class, drawn; batch requests are four times as long."""

    def turn() -> Turn:
        slo_class = prompts.rng.choice(CLASSES)
        times = BATCH_TIMES if slo_class == "batch" else 1
        tokens, output = (shape.drawn(prompts.rng, n * times) for n in (shape.input_len, shape.output_len))
        return Turn(prompts.make(tokens), output, slo_class, slo_class)

    return [Conversation((turn(),)) for _ in range(shape.prompts)]


WORKLOADS: Mapping[str, Workload] = {
    "random": uniform,
    "shared-prefix": shared_prefix,
    "sharegpt": sharegpt,
    "chat": multi_turn,
    "long-beside-chat": long_beside_chat,
    "priority": priorities,
}
