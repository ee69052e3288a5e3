"""The virtual detokenizer: it records when each token arrived, and answers Close with Ended."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from loadtest.simulator.requests import SimRequest
from shared.messages import Close, Open, Rejected, Tokens


@dataclass(slots=True)
class Record:
    """One choice of one request as its reader saw it. `_us` by the world's clock, 0 = never."""

    asked: SimRequest
    arrival_us: int
    first_us: int = 0
    last_us: int = 0
    tokens: int = 0
    stall_us: int = 0  # longest time between two tokens
    ended_us: int = 0
    reason: str = ""  # stop, length, error, rejected
    code: int = 0
    retry_after_ms: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0

    @property
    def served(self) -> bool:
        """It ended by itself."""
        return self.reason in ("stop", "length")

    @property
    def ttft_us(self) -> int:
        return self.first_us - self.arrival_us

    @property
    def tpot_us(self) -> int:
        """Mean time per token after the first."""
        return (self.last_us - self.first_us) // (self.tokens - 1) if self.tokens > 1 else 0

    @property
    def e2e_us(self) -> int:
        return self.ended_us - self.arrival_us


@dataclass(slots=True)
class Readers:
    """All records of a run, and every gap between two tokens of a sequence."""

    records: list[Record] = field(default_factory=list)
    gaps_us: array[int] = field(default_factory=lambda: array("q"))
    series: array[int] = field(default_factory=lambda: array("q"))  # (now_us, tokens) of each message
    open: dict[int, Record] = field(default_factory=dict)

    def opened(self, opened: Open, asked: SimRequest, arrival_us: int) -> None:
        """A sequence gets a reader."""
        if opened.seq not in self.open:
            self.open[opened.seq] = Record(asked, arrival_us, prompt_tokens=opened.prompt_tokens)

    def tokens(self, tokens: Tokens, now_us: int) -> None:
        """The tokens of a step. This runs for every token of the simulation."""
        readers, gaps = self.open, self.gaps_us
        self.series.extend((now_us, sum(tokens.counts)))
        for seq, count in zip(tokens.seqs, tokens.counts, strict=True):
            record = readers[seq]
            record.tokens += count
            if record.last_us:
                gap = now_us - record.last_us
                gaps.append(gap)
                if gap > record.stall_us:
                    record.stall_us = gap
            else:
                record.first_us = now_us
            record.last_us = now_us

    def closed(self, close: Close, now_us: int) -> Record | None:
        """The sequence has ended; None for one that is not open."""
        record = self.open.pop(close.seq, None)
        if record is not None:
            record.ended_us, record.reason, record.code = now_us, close.reason, close.code
            record.retry_after_ms = close.retry_after_ms
            record.cached_tokens = close.usage.cached_tokens
            record.preemptions = sum(decision.what == "preempt" for decision in close.decisions)
            self.records.append(record)
        return record

    def rejected(self, rejected: Rejected, asked: SimRequest, arrival_us: int, now_us: int) -> None:
        """The request was not accepted."""
        self.records.append(
            Record(
                asked,
                arrival_us,
                ended_us=now_us,
                reason="rejected",
                code=rejected.code,
                retry_after_ms=rejected.retry_after_ms,
            )
        )
