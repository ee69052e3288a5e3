"""Measures collectives of one micro-batch under the compute of the other, on the ranks of one host.

    torchrun --nproc-per-node 4 -m loadtest.gpu.comm --out comm4.json

A prefill through all layers, with random weights and a real router, in several ways that are interleaved in
one process. Each way is a CUDA graph, its time is that of the slowest rank, and the figure is the median:

    off         one stream: compute, collective, compute, collective
    silent      the same without collectives: compute alone
    on          two micro-batches, the collectives of one on a high-priority stream under the other's compute
    on 16       the same, the collectives with at most so many of the device's processors
    ... spared  the same, and the products of the compute leave as many free
    ... copy    copies, which take no processors, in place of collectives
    on silent   as on, without collectives: the cost of splitting alone
    auto        the faster of off and on, by split thresholds measured before

`exposed` is the share of the collectives' time (`off` less `silent`) that is left with `on`. The base is
`off`; `to the best off` compares with the faster of `off` and `off copy`.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor

from loadtest.gpu import comm_report
from loadtest.gpu.comm_model import Stack, shapes_of
from loadtest.gpu.comm_times import all_say, talk_us, times
from loadtest.gpu.comm_ways import LIMIT, GroupTalks, How, Together, Way, offered, run_in_turn
from services.executor.parallel.step_split import CUT_TOKENS, Chunk, split_chunks, split_threshold

SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
LARGE = 2048  # tokens from which on more than off, silent, on and their copies are measured
SECONDARY = ("on silent", f"on {LIMIT}")
LONGEST = 8192  # rows of a talk with nothing beside it
PROFILED = 4096  # tokens of the pass whose kernels are timed one by one
REPEATS = 5
PATIENCE = timedelta(seconds=120)  # with a rank that says nothing: then the program ends
STARTED = 2  # repeats of the measurement at start, by which `auto` goes


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="loadtest.gpu.comm", description=__doc__)
    parser.add_argument("--kinds", default="ep,tp")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of a prompt, at most")
    parser.add_argument("--layers", type=int, default=0, help="0: all the model has")
    parser.add_argument("--tiny", action="store_true", help="a toy model on CPUs")
    parser.add_argument("--no-copies", action="store_true", help="collectives alone")
    parser.add_argument("--seconds", type=float, default=270, help="no new size is begun after this")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    began_s = time.monotonic()
    device = _join(asked.tiny)
    found: dict[str, Any] = {"device": comm_report.device(device)}
    for kind in asked.kinds.split(","):
        try:
            found[kind] = Bench(kind, asked, device).run(began_s + asked.seconds)
        except (RuntimeError, ValueError, AssertionError) as error:  # what fails does not end the rest
            found[kind] = f"{type(error).__name__}: {error}"
            print(kind, found[kind], flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if asked.out and distributed.get_rank() == 0:
            asked.out.write_text(json.dumps(found, indent=1) + "\n")
    _say(f"took {time.monotonic() - began_s:.0f} s")
    distributed.destroy_process_group()


def _join(tiny: bool) -> torch.device:
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # multicast stays off
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")  # talks read a graph's buffers through NCCL's own
    if tiny:
        torch.set_num_threads(1)
        distributed.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    distributed.init_process_group("nccl", device_id=device, timeout=PATIENCE)
    return device


def _say(text: str) -> None:
    if distributed.get_rank() == 0:
        print(text, flush=True)


class Bench:
    """One model, at all sizes."""

    def __init__(self, kind: str, asked: argparse.Namespace, device: torch.device) -> None:
        self._kind, self._device, self._on_gpu = kind, device, device.type == "cuda"
        self._prompt = asked.prompt
        self._sizes = [int(size) for size in asked.sizes.split(",")]
        self._group = GroupTalks()
        self._together: Together = run_in_turn
        if self._on_gpu:
            from services.executor.cuda.comm_overlap import CommStream

            self._together = CommStream(device).run_interleaved
        self._stack = Stack(kind, shapes_of(kind, asked.layers, tiny=asked.tiny), self._group, device)
        rows = max(self._sizes + [LONGEST] * self._on_gpu) * self._group.size
        row_bytes = self._stack.shapes.hidden * self._stack.dtype.itemsize
        self._hows = offered(self._group, device, 0 if asked.no_copies else rows * row_bytes)
        self._pool: Any = None

    @torch.inference_mode()
    def run(self, until_s: float) -> dict[str, Any]:
        """Times in ms by size and way, and what follows from them."""
        rows, started = [], {}
        for tokens in sorted(
            self._sizes, reverse=True
        ):  # the largest first: what it needs is there for the others
            if not all_say(time.monotonic() < until_s, self._device):
                _say(f"{self._kind}: no time left for {tokens} tokens")
                continue
            began_s = time.monotonic()
            rows.append(self._row(tokens, started))
            took_s = time.monotonic() - began_s
            _say(f"{self._kind}{self._group.size} {comm_report.line(rows[-1])} | {took_s:.1f} s")
        report = {
            "layers": self._stack.shapes.layers, "prompt": self._prompt, "ranks": self._group.size,
            "crossover": split_threshold(started), "sizes": rows[::-1], "talks": self._alone(),
        }  # fmt: skip
        _say(f"{self._kind}{self._group.size} on from {report['crossover']} tokens")
        return report

    def _row(self, tokens: int, started: dict[int, tuple[float, float]]) -> dict[str, Any]:
        """One size's; `started` gets what was measured first."""
        ways = self._ways(tokens)
        same = self._check(tokens, ways)
        first = comm_report.medians(times(ways, STARTED, self._device))
        one, two = comm_report.quickest(first, "off"), comm_report.quickest(first, "on")
        started[tokens] = first[one], first[two]
        chosen = one if split_threshold(started) > tokens else two
        kernels = {}
        if tokens == PROFILED and self._on_gpu:
            profiled = {"off", two, "on copy"} & set(ways)
            kernels = {way: comm_report.profile(ways[way]) for way in sorted(profiled)}
        found = times({**ways, "auto": ways[chosen]}, REPEATS, self._device)
        more = {"auto is": chosen, "best": two, "same": same, "kernels": kernels}
        return comm_report.row(tokens, found, more)

    def _ways(self, tokens: int) -> dict[str, Way]:
        """How to run a pass in every way. The graphs of a size share memory; that of the last is gone with
        its graphs."""
        self._pool = None
        each = min(tokens, self._prompt)
        firsts = range(0, tokens, each)
        chunks = tuple(Chunk(i, at, 0, min(each, tokens - at)) for i, at in enumerate(firsts))
        x = self._stack.tokens(tokens, self._group.rank)
        attention = self._stack.attention(len(chunks), each)
        parts = split_chunks(chunks, min(CUT_TOKENS, tokens // 2))
        cut = sum(chunk.count for chunk in parts[0])
        prepared = [attention.prepare(part) for part in (chunks, *parts)]
        inputs = [x, x[:cut], x[cut:]]
        ways = {}
        for name, how in self._hows.items():
            if tokens < LARGE and (name in SECONDARY or "spared" in name):
                continue
            which = slice(1, 3) if name.startswith("on") else slice(0, 1)

            def run(together: Together, out: Tensor, which: slice = which, how: How = how) -> None:
                programs = [
                    self._stack.program(some, attention, made, how.talks)
                    for some, made in zip(inputs[which], prepared[which], strict=True)
                ]
                torch.cat(together(programs), out=out)

            way = self._way(name, run, torch.empty_like(x), how.spare)
            if way is not None:
                ways[name] = way
        return ways

    def _way(self, name: str, run: Callable[[Together, Tensor], None], out: Tensor, spare: int) -> Way | None:
        """None, on all ranks, if it fails on any."""
        way = None
        try:
            way = Way(run, self._together if name.startswith("on") else run_in_turn, out, spare)
            if self._on_gpu:
                way.capture(self._pool)
                self._pool = self._pool or way.graph.pool()
        except (RuntimeError, OSError) as error:
            print(f"rank {self._group.rank}: {name}: {error}", flush=True)
            way = None
        return way if all_say(way is not None, self._device) else None

    def _check(self, tokens: int, ways: dict[str, Way]) -> dict[str, Any]:
        """Whether halves in flight together give, bit by bit, what they give in turn, and how far they are
        from the whole. A token that a rounding routes otherwise is far off: so the median counts."""
        found = {}
        ways["off"]()
        wanted = ways["off"].out.float()
        for name, way in ways.items():
            if name in ("off", "silent", "on silent"):
                continue
            way.directly(run_in_turn)
            turns = way.out.clone()
            way.out.fill_(torch.nan)
            way()
            far = ((way.out.float() - wanted).norm(dim=1) / wanted.norm(dim=1)).median().item()
            found[name] = {"as in turn": torch.equal(way.out, turns), "from off": far}
            _say(f"{self._kind} {tokens} {name}: {found[name]}")
        return found

    def _alone(self) -> list[dict[str, Any]]:
        """Talks with nothing beside them, in µs, by the bytes that a rank has."""
        if not self._on_gpu:
            return []
        found = []
        for rows in (64, 512, 2048, 4096, LONGEST):
            x = torch.randn(rows, self._stack.shapes.hidden, dtype=self._stack.dtype, device=self._device)
            wide = x.new_empty(self._group.size, *x.shape)
            us = {}
            for way in ("off", f"on {LIMIT}", "off copy"):
                if way in self._hows:
                    group = self._hows[way].talks
                    for name, talk in {
                        "all_gather": functools.partial(group.all_gather_into, wide, x),
                        "reduce_scatter": functools.partial(group.reduce_scatter_into, x, wide),
                        "all_reduce": functools.partial(group.all_reduce, x),
                    }.items():
                        x.zero_()
                        wide.zero_()
                        us[f"{name} {way.removeprefix('off').removeprefix('on').strip()}".strip()] = talk_us(
                            talk
                        )
            found.append({"bytes": x.numel() * x.element_size(), "us": us})
            _say(f"talks {found[-1]['bytes']} bytes { {key: round(value) for key, value in us.items()} }")
        return found


if __name__ == "__main__":
    main()
