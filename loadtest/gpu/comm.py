"""Communication of one half of a step under the compute of the other: measured on the ranks of one host.

    torchrun --nproc-per-node 4 -m loadtest.gpu.comm --out comm4.json

A prefill through all layers, with random weights and a real router, in a few ways that are interleaved in one
process; each way is a CUDA graph, its time that of the slowest rank, and what is said is the median:

    off         one stream: compute, talk, compute, talk
    silent      the same, but nothing is said: compute alone
    on          two halves, the talks of one on a high-priority stream under the compute of the other
    on 16, ...  the same, the talks with at most so many of the device's processors
    on silent   the same, but nothing is said: what halving alone costs
    auto        off or on, by crossovers measured before

Of the time that talking adds to compute alone, `exposed` is the part that is left with `on`.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor

from loadtest.gpu import comm_report
from loadtest.gpu.comm_model import Stack, Talks, shapes_of
from services.executor.collectives import Collectives
from services.executor.crossover import crossover
from services.executor.cuda.halves import CUT_TOKENS, halves
from services.executor.cuda.inputs import Chunk
from services.executor.programs import Program, in_turn

SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
LIMITED = (8, 16)  # thread blocks of a talk, for sizes from here on:
LARGE = 2048
PROFILED = 4096  # tokens of the pass whose kernels are timed one by one
REPEATS = 5
STARTED = 2  # repeats of the measurement at start, by which `auto` goes

Together = Callable[[Sequence[Program]], list[Tensor]]


class Silent:
    """Ranks that say nothing: a rank gets its own part of what it would get, so that numbers stay numbers."""

    def __init__(self, group: Collectives) -> None:
        self.rank, self.size = group.rank, group.size

    def all_reduce(self, x: Tensor) -> None:
        return

    def all_gather_into(self, out: Tensor, x: Tensor) -> None:
        if (
            x.dtype == torch.int32
        ):  # routes: as if all ranks had these, so that the experts have as much to do
            out.copy_(x.expand_as(out))
        else:
            out[self.rank].copy_(x)

    def reduce_scatter_into(self, out: Tensor, x: Tensor) -> None:
        out.copy_(x[self.rank])

    def all_to_all_into(self, out: Tensor, x: Tensor, came: list[int], sent: list[int]) -> None:
        raise NotImplementedError("the host reads what comes")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="loadtest.gpu.comm", description=__doc__)
    parser.add_argument("--kinds", default="ep,tp")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of a prompt, at most")
    parser.add_argument("--layers", type=int, default=0, help="0: all the model has")
    parser.add_argument("--tiny", action="store_true", help="a toy model on CPUs")
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
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")  # talks read a graph's buffers through NCCL's own
    if tiny:
        torch.set_num_threads(1)
        distributed.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    distributed.init_process_group("nccl", device_id=device)
    return device


def _limited(most: int) -> Talks:
    """Ranks whose talks take at most so many thread blocks, on every rank at once."""
    options = distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = most
    return Collectives(distributed.new_group(pg_options=options))


def _say(text: str) -> None:
    if distributed.get_rank() == 0:
        print(text, flush=True)


class Way:
    """A pass, as a graph on a GPU. Keeps what the graph reads."""

    graph: Any = None

    def __init__(self, run: Callable[[Together, Tensor], None], together: Together, out: Tensor) -> None:
        """`run` writes to the tensor it gets."""
        self.run, self._together, self.out = run, together, out
        self()

    def capture(self, pool: Any) -> None:
        """From now on replay a graph."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self()
        self.graph = graph
        self()
        torch.cuda.synchronize()

    def __call__(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        else:
            self.run(self._together, self.out)


class Bench:
    """One model, at all sizes."""

    def __init__(self, kind: str, asked: argparse.Namespace, device: torch.device) -> None:
        self._kind, self._device, self._on_gpu = kind, device, device.type == "cuda"
        self._prompt = asked.prompt
        self._sizes = [int(size) for size in asked.sizes.split(",")]
        self._group = Collectives()
        self._together: Together = in_turn
        self._talks: dict[str, Talks] = {"off": self._group, "silent": Silent(self._group)}
        self._talks |= {"on": self._group}
        if self._on_gpu:
            from services.executor.cuda.lanes import Lanes

            self._together = Lanes(device).together
            self._talks |= {f"on {most}": _limited(most) for most in LIMITED}
        self._talks["on silent"] = Silent(self._group)
        self._stack = Stack(kind, shapes_of(kind, asked.layers, tiny=asked.tiny), self._group, device, 0)
        self._pool: Any = None

    @torch.inference_mode()
    def run(self, until_s: float) -> dict[str, Any]:
        """Times in ms by size and way, and what follows from them."""
        rows, started = [], {}
        for tokens in sorted(self._sizes, reverse=True):  # the largest first: graphs share their memory
            late = torch.tensor([float(time.monotonic() > until_s)], device=self._device)
            distributed.all_reduce(late)
            if late.item():
                _say(f"{self._kind}: no time left for {tokens} tokens")
                continue
            began_s = time.monotonic()
            ways = self._ways(tokens)
            checked = self._check(tokens, ways)
            runs: dict[str, Callable[[], None]] = {**ways}
            first = {way: statistics.median(times) for way, times in _times(runs, STARTED, self._device)}
            started[tokens] = first["off"], min(first[way] for way in runs if _said_on(way))
            best = min((way for way in runs if _said_on(way)), key=first.__getitem__)
            chosen = "off" if crossover(started) > tokens else best
            profiles = {}
            if tokens == PROFILED and self._on_gpu:
                profiles = {way: comm_report.profile(runs[way]) for way in ("off", best)}
            runs["auto"] = runs[chosen]
            found = dict(_times(runs, REPEATS, self._device))
            rows.append(
                comm_report.row(
                    tokens, found, {"auto is": chosen, "best": best, "same": checked, "kernels": profiles}
                )
            )
            took_s = time.monotonic() - began_s
            _say(f"{self._kind}{self._group.size} {comm_report.line(rows[-1])} | {took_s:.1f} s")
        report = {
            "layers": self._stack.shapes.layers, "prompt": self._prompt, "ranks": self._group.size,
            "crossover": crossover(started), "sizes": rows[::-1], "talks": self._alone(),
        }  # fmt: skip
        _say(f"{self._kind}{self._group.size} on from {report['crossover']} tokens")
        return report

    def _ways(self, tokens: int) -> dict[str, Way]:
        """How to run a pass in every way."""
        each = min(tokens, self._prompt)
        firsts = range(0, tokens, each)
        chunks = tuple(Chunk(i, at, 0, min(each, tokens - at)) for i, at in enumerate(firsts))
        x = self._stack.tokens(tokens, self._group.rank)
        attention = self._stack.attention(len(chunks), each)
        parts = halves(chunks, min(CUT_TOKENS, tokens // 2))
        cut = sum(chunk.count for chunk in parts[0])
        prepared = [attention.prepare(part) for part in (chunks, *parts)]
        inputs = [x, x[:cut], x[cut:]]
        ways = {}
        for way, talks in self._talks.items():
            if way in ("on silent", *(f"on {most}" for most in LIMITED)) and tokens < LARGE:
                continue
            which = slice(1, 3) if way.startswith("on") else slice(0, 1)

            def run(together: Together, out: Tensor, which: slice = which, talks: Talks = talks) -> None:
                programs = [
                    self._stack.program(some, attention, made, talks)
                    for some, made in zip(inputs[which], prepared[which], strict=True)
                ]
                torch.cat(together(programs), out=out)

            ways[way] = Way(run, self._together if len(inputs[which]) > 1 else in_turn, torch.empty_like(x))
        if self._on_gpu:
            for each_way in ways.values():
                each_way.capture(self._pool)
                self._pool = self._pool or each_way.graph.pool()
        return ways

    def _check(self, tokens: int, ways: dict[str, Way]) -> dict[str, Any]:
        """Whether halves in flight together give, bit by bit, what they give in turn, and how far they are
        from the whole. A token that a rounding routes otherwise is far off: so the median counts."""
        found = {}
        ways["off"]()
        wanted = ways["off"].out.float()
        for name, way in ways.items():
            if not _said_on(name):
                continue
            way.run(in_turn, way.out)
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
        for rows in (64, 512, 2048, 4096, 8192):
            x = torch.randn(rows, self._stack.shapes.hidden, dtype=self._stack.dtype, device=self._device)
            wide = x.new_empty(self._group.size, *x.shape)
            us = {}
            for way in ("off", *(f"on {most}" for most in LIMITED)):
                group = self._talks[way]
                for name, talk in {
                    "all_gather": functools.partial(group.all_gather_into, wide, x),
                    "reduce_scatter": functools.partial(group.reduce_scatter_into, x, wide),
                    "all_reduce": functools.partial(group.all_reduce, x),
                }.items():
                    x.zero_()
                    wide.zero_()
                    us[f"{name} {way.removeprefix('off').removeprefix('on ')}".strip()] = _talk_us(talk)
            found.append({"bytes": x.numel() * x.element_size(), "us": us})
            _say(f"talks {found[-1]['bytes']} bytes { {key: round(value) for key, value in us.items()} }")
        return found


def _said_on(way: str) -> bool:
    return way.startswith("on") and way != "on silent"


def _talk_us(talk: Callable[[], None], times: int = 10) -> float:
    for _ in range(3):
        talk()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        talk()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end) / times


def _times(
    runs: dict[str, Callable[[], object]], repeats: int, device: torch.device
) -> Iterator[tuple[str, list[float]]]:
    """Of every way the times in ms, the slowest rank's of each repeat; ways take turns."""
    found: dict[str, list[float]] = {way: [] for way in runs}
    for _ in range(repeats):
        for way, run in runs.items():
            found[way].append(_once_ms(run, device))
    table = torch.tensor(list(found.values()), device=device)
    distributed.all_reduce(table, op=distributed.ReduceOp.MAX)
    yield from zip(found, table.tolist(), strict=True)


def _once_ms(run: Callable[[], object], device: torch.device) -> float:
    together = torch.zeros(1, device=device)
    distributed.all_reduce(together)  # ranks begin together
    if device.type != "cuda":
        began_s = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - began_s)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


if __name__ == "__main__":
    main()
