"""The text that `vllm bench serve` prints, line for line, with Headrace's own lines at the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from loadtest.bench.figures import PERCENTILES

WIDTH = 50
BUSY_PCT = 80.0  # of one core, which is all that an event loop has
TITLES = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
    "stall": ("Longest gap of a request", "stall"),
}
COUNTS = (
    ("Successful requests:", "completed"),
    ("Failed requests:", "failed"),
    ("Maximum request concurrency:", "max_concurrency"),
    ("Request rate configured (RPS):", "request_rate"),
    ("Benchmark duration (s):", "duration"),
    ("Total input tokens:", "total_input_tokens"),
    ("Total generated tokens:", "total_output_tokens"),
    ("Request throughput (req/s):", "request_throughput"),
    ("Request goodput (req/s):", "request_goodput"),
    ("Output token throughput (tok/s):", "output_throughput"),
    ("Peak output token throughput (tok/s):", "max_output_tokens_per_s"),
    ("Peak concurrent requests:", "max_concurrent_requests"),
    ("Total token throughput (tok/s):", "total_token_throughput"),
)
OURS = (
    ("Cached prompt tokens:", "cached_tokens"),
    ("Prompt tokens that the trace repeats:", "repeated_tokens"),
    ("Requests with less cached than repeated:", "requests_below_repeats"),
    ("Requests with more cached than repeated:", "requests_above_repeats"),
    ("Requests without a count by the server:", "uncounted_requests"),
    ("P99 late sending (ms):", "p99_late_ms"),
    ("Max late sending (ms):", "max_late_ms"),
    ("Client CPU (% of a core):", "client_cpu_pct"),
)
COUNTED = (
    ("Recompute overhead (%):", "recompute_overhead_pct"),
    ("Recomputed tokens:", "recomputed"),
    ("Preemptions:", "preemptions"),
    ("Tokens from the prefix cache:", "prefix_hits"),
    ("Blocks from L1:", "l1_hit_blocks"),
    ("Blocks from L2:", "l2_hit_blocks"),
    ("Tokens restored from L1 and L2:", "restored_tokens"),
)


def block(run: dict[str, Any]) -> str:
    """One run of a result as text. What does not apply is left out."""
    figures, counted = {**run["point"], **run["figures"]}, run.get("counted") or {}
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}", *_rows(COUNTS, figures)]
    for name, (title, short) in TITLES.items():
        names = [("Mean", "mean"), ("Median", "median"), *((f"P{p}", f"p{p}") for p in PERCENTILES)]
        if name == "stall":
            names.append(("Max", "max"))
        rows = [(f"{word} {short} (ms):", f"{figure}_{name}_ms") for word, figure in names]
        lines += [f"{title:-^{WIDTH}}", *_rows(rows, figures)]
    lines += [f"{'Headrace':-^{WIDTH}}", *_rows(OURS, figures), *_rows(COUNTED, counted)]
    lines += [f"{count} x {error}" for error, count in figures["errors"].items()]
    if figures.get("client_cpu_pct", 0.0) > BUSY_PCT:
        lines.append("warning: the client was nearly full: its own work is in these latencies")
    return "\n".join([*lines, "=" * WIDTH])


def _rows(rows: Iterable[tuple[str, str]], figures: dict[str, Any]) -> Iterator[str]:
    for words, name in rows:
        value = figures.get(name)
        if value is not None:
            yield f"{words:<40} {value:<10.2f}" if isinstance(value, float) else f"{words:<40} {value:<10}"
