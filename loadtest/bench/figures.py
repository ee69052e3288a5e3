"""Computes figures from records, with the names and definitions of `vllm bench serve` (calculate_metrics of
vllm/benchmarks/serve.py): percentiles are linear, TPOT leaves out the first token, a request of one token
has TPOT 0 for its goodput and none in the mean. Three things differ on purpose:

* times count from the intended sending, not from the moment when the client was ready to send;
* a missing value is None, where vLLM has 0;
* the peak of a second counts tokens; vLLM counts chunks, which may hold several tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from loadtest.bench.record import Record
from shared.errors import BadRequest

PERCENTILES = (90, 95, 99)
SPREADS = ("ttft", "tpot", "itl", "e2el", "stall", "late")
GOALS = ("ttft", "tpot", "e2el")
Figures = dict[str, Any]


def figures(records: Sequence[Record], started_us: int, goals: Mapping[str, float]) -> Figures:
    """The figures of one run that began at `started_us`. `goals` in ms, empty for no goodput."""
    good = [record for record in records if record.good]
    duration_s = (max((record.ended_us for record in records), default=started_us) - started_us) / 1e6
    prompt, answer = (sum(r.prompt_tokens for r in good), sum(r.output_tokens for r in good))

    def rate(amount: int) -> float:
        return amount / duration_s if duration_s > 0 else 0.0

    return {
        "completed": len(good),
        "failed": len(records) - len(good),
        "duration": duration_s,
        "total_input_tokens": prompt,
        "total_output_tokens": answer,
        "request_throughput": rate(len(good)),
        "request_goodput": rate(sum(keeps(record, goals) for record in good)) if goals else None,
        "output_throughput": rate(answer),
        "max_output_tokens_per_s": _busiest_second(good),
        "max_concurrent_requests": most_at_once(good),
        "total_token_throughput": rate(prompt + answer),
        "cached_tokens": _cached(good),
        **_repeats(good),
        "uncounted_requests": sum(record.usage is None for record in good),
        "errors": dict(Counter(record.error for record in records if record.error).most_common(10)),
        **_spreads(records, good),
    }


def keeps(record: Record, goals: Mapping[str, float]) -> bool:
    """Whether a request kept every goal, given in ms."""
    took_ms = {
        "ttft": record.ttft_us / 1e3,
        "tpot": (record.tpot_us or 0.0) / 1e3,
        "e2el": record.e2el_us / 1e3,
    }
    return all(took_ms[name] <= most for name, most in goals.items())


def read_goals(pairs: Sequence[str]) -> dict[str, float]:
    """`ttft:500 tpot:50 e2el:…`, in ms. Raises BadRequest."""
    goals: dict[str, float] = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        try:
            goals[name] = float(value)
        except ValueError:
            raise BadRequest(f"--goodput takes NAME:MS, like ttft:500, not {pair!r}") from None
        if name not in GOALS or not goals[name] >= 0:
            raise BadRequest(f"--goodput takes {', '.join(GOALS)} with a time of 0 ms or more, not {pair!r}")
    return goals


def spread(values_us: Sequence[float]) -> dict[str, float | None]:
    """Mean, median, standard deviation, percentiles and the most, in ms."""
    if not values_us:
        return dict.fromkeys(("mean", "median", "std", *(f"p{p}" for p in PERCENTILES), "max"))
    values = np.asarray(values_us, dtype=float) / 1e3
    return {
        "mean": float(values.mean()),
        "median": float(np.median(values)),
        "std": float(values.std()),
        **{f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES},
        "max": float(values.max()),
    }


def most_at_once(good: Sequence[Record]) -> int:
    """The most requests in flight, each from when it was really sent to its last text."""
    steps = [(r.sent_us, 1) for r in good] + [(r.chunks_us[-1], -1) for r in good]
    running = np.cumsum([step for _, step in sorted(steps)])  # an end goes before a beginning
    return int(running.max(initial=0))


def _spreads(records: Sequence[Record], good: Sequence[Record]) -> Figures:
    values: dict[str, list[float]] = {
        "ttft": [r.ttft_us for r in good],
        "tpot": [r.tpot_us for r in good if r.tpot_us is not None],
        "itl": [itl for r in good for itl in r.itls_us],
        "e2el": [r.e2el_us for r in good],
        "stall": [r.stall_us for r in good if len(r.chunks_us) > 1],
        "late": [r.late_us for r in records if r.sent_us],
    }
    return {
        f"{figure}_{name}_ms": value for name in SPREADS for figure, value in spread(values[name]).items()
    }


def _busiest_second(good: Sequence[Record]) -> float:
    """Tokens in the busiest second, counted in whole seconds from the first sending."""
    begin_us = min((r.sent_us for r in good), default=0)
    tokens: dict[int, float] = {}
    for record in good:
        each = record.output_tokens / len(record.chunks_us)
        pieces = Counter((at_us - begin_us) // 1_000_000 for at_us in record.chunks_us)
        for second, count in pieces.items():
            tokens[second] = tokens.get(second, 0.0) + count * each
    return max(tokens.values(), default=0.0)


def _cached(good: Sequence[Record]) -> int | None:
    counted = [record.cached_tokens for record in good if record.cached_tokens is not None]
    return sum(counted) if counted else None


def _repeats(good: Sequence[Record]) -> Figures:
    """How the server's hits compare with what the workload's prompts repeat, where that is known."""
    counted = [r for r in good if r.repeated_tokens is not None and r.cached_tokens is not None]
    if not counted:
        return {}
    off = [(r.cached_tokens or 0) - (r.repeated_tokens or 0) for r in counted]
    return {
        "repeated_tokens": sum(r.repeated_tokens or 0 for r in counted),
        "requests_below_repeats": sum(each < 0 for each in off),
        "requests_above_repeats": sum(each > 0 for each in off),
    }
