"""The record of one request: timestamps of one monotonic clock, and the server's own counts.

All latencies count from the *intended* time of sending. A late client, or a wait for a free client, makes the
figures worse and never better (coordinated omission).

    intended ── sent ────── first text ── text ── text ───── ended
       |        late           |           itl     |
       |------- ttft ----------|                   |
       |------- e2el ------------------------------|
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class Record:
    """One request. Times in µs on the client's clock; 0 is not yet."""

    kind: str  # which part of the workload it belongs to
    intended_us: int
    sent_us: int = 0
    ended_us: int = 0
    chunks_us: list[int] = field(default_factory=list)  # when a piece of the answer that has text came
    chunk_tokens: int = 0  # tokens in these, where the server sends their number, else one for each
    usage: tuple[int, int] | None = None  # tokens of prompt and answer as the server counts them
    cached_tokens: int | None = None  # of the prompt; None where the server does not send it
    error: str = ""
    text: str = ""
    repeated_tokens: int | None = None  # see Turn

    def took(self, text: str, now_us: int, tokens: int = 1) -> None:
        """A piece of the answer came."""
        self.chunks_us.append(now_us)
        self.chunk_tokens += tokens
        self.text += text

    def counted(self, prompt: int, answer: int, cached: int | None) -> None:
        """The server's own count came."""
        self.usage, self.cached_tokens = (prompt, answer), cached

    def end(self, now_us: int) -> None:
        """The last byte came. An answer without any text has its first token here at the latest."""
        self.ended_us = now_us
        if not self.chunks_us and not self.error:
            self.chunks_us.append(now_us)

    @property
    def good(self) -> bool:
        """Whether the answer is whole."""
        return not self.error and self.ended_us > 0

    @property
    def prompt_tokens(self) -> int:
        """By the server's count; 0 where it gives none."""
        return self.usage[0] if self.usage else 0

    @property
    def output_tokens(self) -> int:
        """By the server's count, else by the counts of the pieces."""
        return self.usage[1] if self.usage else self.chunk_tokens

    @property
    def late_us(self) -> int:
        """How long after its time it was sent."""
        return self.sent_us - self.intended_us

    @property
    def ttft_us(self) -> int:
        """Until the first text."""
        return self.chunks_us[0] - self.intended_us

    @property
    def e2el_us(self) -> int:
        """Until the last text, as vLLM has it: what follows carries no token."""
        return self.chunks_us[-1] - self.intended_us

    @property
    def tpot_us(self) -> float | None:
        """Per token after the first; None where there is none."""
        after = self.output_tokens - 1
        return (self.chunks_us[-1] - self.chunks_us[0]) / after if after > 0 else None

    @property
    def itls_us(self) -> list[int]:
        """Between pieces with text, which may hold several tokens."""
        return [b - a for a, b in pairwise(self.chunks_us)]

    @property
    def stall_us(self) -> int:
        """The longest of these."""
        return max(self.itls_us, default=0)
