"""Measures the hits of the prefix cache in real conversations: a public trace through the block pool.

    python -m loadtest.prefix_cache conversation_trace.jsonl --out prefix_cache.json

The trace is Mooncake's (kvcache-ai/Mooncake, FAST25-release/traces, Apache-2.0): 12,031 requests with prompts
given as ids of 512-token blocks; an id stands for its block and all blocks before it. Requests are served one
after the other: longest cached prefix, the rest allocated, keyed and released. So this is what a cache of
that size can find, without the losses of waiting and of concurrent requests.

Ids form a tree and new ones count up, so two numbers describe a request: the last block that it shares with
an earlier one, and the number of new ones. In this form (`--compact`) the whole trace is a test's data.
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from loadtest.fleet import cpu_name
from services.scheduler.state.block_pool import BlockPool
from shared.kv_blocks import extend, root_key
from shared.messages import ints

POOLS = (1_000, 3_000, 10_000, 30_000, 100_000, 1_000_000)
HEADER = "# Mooncake conversation trace (kvcache-ai/Mooncake, Apache-2.0): last known block id, new blocks\n"


@dataclass(frozen=True)
class Replay:
    """One replay: per request the prompt's blocks that were found, and the block pool's CPU time."""

    hits: list[int]
    evicted: int
    cpu_us: float


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    pool_blocks: int
    hit_blocks: int
    hit_percent: float
    evicted_blocks: int
    pool_cpu_us_per_block: float


def load(path: Path) -> list[list[int]]:
    """The block ids of each request, from the published JSONL or from the compact form."""
    if path.suffix != ".gz":
        return [json.loads(line)["hash_ids"] for line in path.read_text().splitlines()]
    parent: list[int] = []  # of each block: the one before it, -1 for none
    requests = []
    for line in gzip.decompress(path.read_bytes()).decode().splitlines()[1:]:
        last, new = (int(number) for number in line.split())
        first_new = len(parent)
        parent += [last, *range(first_new, first_new + new - 1)][:new]
        ids, block = [], first_new + new - 1 if new else last
        while block >= 0:
            ids.append(block)
            block = parent[block]
        requests.append(ids[::-1])
    return requests


def compact(requests: Iterable[list[int]]) -> bytes:
    """The compact form. Raises ValueError for a trace that is no tree, or whose new ids do not count up."""
    parent: list[int] = []
    lines = [HEADER]
    for ids in requests:
        known = sum(block < len(parent) for block in ids)
        fresh = list(range(len(parent), len(parent) + len(ids) - known))
        before = [-1, *ids][: len(ids)]
        if ids[known:] != fresh or [parent[block] for block in ids[:known]] != before[:known]:
            raise ValueError(f"request {len(lines) - 1} does not continue a tree of numbered blocks")
        parent += before[known:]
        lines.append(f"{ids[known - 1] if known else -1} {len(fresh)}\n")
    return gzip.compress("".join(lines).encode(), mtime=0)


def keys_of(requests: Iterable[list[int]]) -> list[list[bytes]]:
    """A chain of keys for each request, over its block ids in place of tokens."""
    root, chains = root_key("trace", ""), []
    for ids in requests:
        chains.append(keys := list[bytes]())
        extend(keys, root, ints(ids), 1, len(ids))
    return chains


def replay(chains: Iterable[list[bytes]], pool_blocks: int) -> Replay:
    """Serve the requests one by one. Raises ValueError when one needs more than the pool has."""
    pool = BlockPool(blocks=pool_blocks, slots=1, block_tokens=512)
    hits = []
    started = time.process_time()
    for keys in chains:
        table = pool.match(keys)
        pool.adopt(table)
        hits.append(len(table))
        for key in keys[len(table) :]:
            block = pool.try_allocate()
            if block is None:
                raise ValueError(f"a prompt of {len(keys)} blocks does not fit a pool of {pool_blocks}")
            pool.register(block, [key])
            table += block
        pool.release(table, (), 0)
    cpu_us = (time.process_time() - started) * 1e6
    pool.check()
    return Replay(hits, pool.evicted, cpu_us)


def row_of(chains: list[list[bytes]], pool_blocks: int) -> Row:
    """The best time of three replays, which find the same."""
    runs = [replay(chains, pool_blocks) for _ in range(3)]
    blocks, hits = sum(len(keys) for keys in chains), sum(runs[0].hits)
    return Row(
        pool_blocks=pool_blocks,
        hit_blocks=hits,
        hit_percent=round(100 * hits / blocks, 3),
        evicted_blocks=runs[0].evicted,
        pool_cpu_us_per_block=round(min(run.cpu_us for run in runs) / blocks, 2),
    )


def table(rows: Iterable[Row]) -> str:
    """The rows as Markdown."""
    lines = [
        "| pool, blocks | blocks found | hit rate | evicted | CPU µs a block |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.pool_blocks:,} | {row.hit_blocks:,} | {row.hit_percent:.2f} % | "
        f"{row.evicted_blocks:,} | {row.pool_cpu_us_per_block:.2f} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, help="Mooncake's JSONL, or the compact form (.gz)")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    parser.add_argument("--compact", type=Path, help="where to write the trace in compact form")
    arguments = parser.parse_args()
    requests = load(arguments.trace)
    if arguments.compact:
        arguments.compact.write_bytes(compact(requests))
    started = time.process_time()
    chains = keys_of(requests)
    blocks = sum(len(ids) for ids in requests)
    key_cpu_us = round((time.process_time() - started) * 1e6 / blocks, 2)
    rows = [row_of(chains, pool_blocks) for pool_blocks in POOLS]
    report = {
        "machine": {"cpu": cpu_name(), "python": platform.python_version()},
        "trace": {
            "requests": len(requests),
            "blocks": blocks,
            "distinct_blocks": len({block for ids in requests for block in ids}),
            "largest_prompt_blocks": max(len(ids) for ids in requests),
        },
        "key_cpu_us_per_id": key_cpu_us,
        "pools": [asdict(row) for row in rows],
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(table(rows))
    print(json.dumps({name: value for name, value in report.items() if name != "pools"}))


if __name__ == "__main__":
    main()
