"""Times work that several ranks run together, for loadtest.gpu.comm."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as distributed

Run = Callable[[], object]


def times(runs: Mapping[str, Run], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Of every run the times in ms, the slowest rank's of each repeat. Runs take turns, in another order each
    time, and each runs once untimed first: what ran before leaves its clock to what follows, a per cent or
    five of it."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats):
        order = list(runs)
        random.Random(repeat).shuffle(order)  # the same on all ranks
        for name in order:
            runs[name]()
            found[name].append(_once_ms(runs[name], device))
    table = torch.tensor(list(found.values()), device=device)
    distributed.all_reduce(table, op=distributed.ReduceOp.MAX)
    return dict(zip(found, table.tolist(), strict=True))


def talk_us(talk: Run, repeats: int = 10) -> float:
    """Of a talk on a GPU, with nothing beside it."""
    for _ in range(3):
        talk()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        talk()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end) / repeats


def all_say(yes: bool, device: torch.device) -> bool:
    """Whether all ranks say so."""
    said = torch.tensor([float(yes)], device=device)
    distributed.all_reduce(said, op=distributed.ReduceOp.MIN)
    return bool(said.item())


def _once_ms(run: Run, device: torch.device) -> float:
    distributed.all_reduce(torch.zeros(1, device=device))  # ranks begin together
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
