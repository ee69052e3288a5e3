"""Workloads from the public traces. Both give lengths and times; the text is random.

Azure (CSV): TIMESTAMP,ContextTokens,GeneratedTokens. Prompts share nothing.
Mooncake (JSON lines): timestamp in ms, input_length, output_length, hash_ids. Prompts with the same first
hash ids have the same first blocks of 512 tokens.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from loadtest.simulator.requests import SimRequest, Workload, plain_prompt
from shared.messages import Ints, ints

MOONCAKE_BLOCK = 512  # tokens that one hash id stands for
SAMPLES = Path(__file__).resolve().parents[2] / "tests" / "data"
AZURE_SAMPLE = SAMPLES / "azure_conv_10min.csv"
MOONCAKE_SAMPLE = SAMPLES / "mooncake_conversation_150.jsonl"
MINUTE_US = 60_000_000


@dataclass(frozen=True)
class Cut:
    """How much of a trace: so many minutes of it, replayed `speed` times as fast."""

    minutes: float = 1e9
    speed: float = 1.0
    max_tokens: int = 1_024  # asked for by every request, if its answer is not longer
    classes: tuple[str, ...] = ("standard",)  # in turn


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a trace, its time after the beginning as replayed."""

    number: int
    at_us: int
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


def azure(path: Path, cut: Cut) -> Workload:
    """The requests of an Azure trace."""
    rows = azure_rows(path, cut)
    return Workload(tuple(_request(row, plain_prompt(row.number, row.prompt_tokens), cut) for row in rows))


def mooncake(path: Path, cut: Cut) -> Workload:
    """The requests of a Mooncake trace, with the prefixes that they share."""
    rows = mooncake_rows(path, cut)
    return Workload(tuple(_request(row, hashed_prompt(row.hash_ids, row.prompt_tokens), cut) for row in rows))


def azure_rows(path: Path, cut: Cut) -> Iterator[Row]:
    """An Azure trace as it was recorded."""
    with path.open(newline="") as lines:
        first: datetime | None = None
        for number, row in enumerate(csv.DictReader(lines), 1):
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])  # 7 digits of a second: one too many
            first = first or at
            passed = at - first
            passed_us = (passed.days * 86_400 + passed.seconds) * 1_000_000 + passed.microseconds
            if passed_us >= cut.minutes * MINUTE_US:
                return
            prompt, output = max(int(row["ContextTokens"]), 1), int(row["GeneratedTokens"])
            yield Row(number, int(passed_us / cut.speed), prompt, output)


def mooncake_rows(path: Path, cut: Cut) -> Iterator[Row]:
    """A Mooncake trace as it was recorded."""
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            row = json.loads(line)
            passed_us = row["timestamp"] * 1_000
            if passed_us >= cut.minutes * MINUTE_US:
                return
            lengths = row["input_length"], row["output_length"]
            yield Row(number, int(passed_us / cut.speed), *lengths, tuple(row["hash_ids"]))


def hashed_prompt(hash_ids: tuple[int, ...], tokens: int) -> Callable[[], Ints]:
    """A prompt whose blocks of 512 tokens are equal where the hash ids are."""

    def make() -> Ints:
        prompt = ints()
        for hash_id in hash_ids:
            prompt.extend(ints([hash_id]) * min(MOONCAKE_BLOCK, tokens - len(prompt)))
        return prompt

    return make


def _request(row: Row, prompt: Callable[[], Ints], cut: Cut) -> SimRequest:
    return SimRequest(
        request=f"r{row.number}",
        arrival_us=row.at_us,
        prompt=prompt,
        output_tokens=max(row.output_tokens, 1),
        max_tokens=max(row.output_tokens, cut.max_tokens),
        slo_class=cut.classes[row.number % len(cut.classes)],
    )
