"""The GPU's part of loadtest.kv_copies: pinning, one call a piece or a block, and steps beside them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from loadtest.kv_copies import Rig, beside, by_piece, by_size, segment
from services.executor.arena import Arena

ARENA_GIB = (1, 8, 32)
ROWS, WIDTH, LAYERS = 32, 8_192, 60
_GIB = 1 << 30


def pinning() -> list[dict[str, Any]]:
    """What it costs to pin an arena: of pages that are not there yet, that are reserved, and again."""
    import torch

    from services.executor.kv_transfer.copiers import _pin, _unpin

    rows, device = [], torch.device("cuda")
    for gib in ARENA_GIB:
        for reserved in (False, True):
            began_s = time.monotonic()
            with segment(gib * _GIB, reserved=reserved) as path:
                made_s = time.monotonic() - began_s
                arena = Arena(path.name, int(path.name.rpartition("_g")[2]))
                view = torch.frombuffer(arena.view, dtype=torch.uint8)
                times = [
                    _timed(lambda view=view: _pin(view, device)),
                    _timed(lambda view=view: _unpin(view, device)),
                ]
                times += [
                    _timed(lambda view=view: _pin(view, device)),
                    _timed(lambda view=view: _unpin(view, device)),
                ]
                del view
                arena.close()
            names = ("pin_s", "unpin_s", "pin_again_s", "unpin_again_s")
            took = {name: round(took_s, 3) for name, took_s in zip(names, times, strict=True)}
            rows.append({"gib": gib, "reserved": reserved, "make_s": round(made_s, 3), **took})
            print("pinning", rows[-1], flush=True)
    return rows


def gpu_step() -> Callable[[], float]:
    """A step of decodes as a graph: 32 rows through 60 matrices of 128 MiB, bound by reading them."""
    import torch

    weights = [torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)]
    rows = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, device="cuda")
    torch.mm(rows, weights[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            torch.mm(rows, weight)

    def step() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    for _ in range(5):
        step()
    return step


def one_by_one(made: Rig) -> None:
    """Have it copy with one call a block."""
    copier: Any = made.copier
    copier._engine.batches = False


def in_batches(made: Rig) -> None:
    """It must do so by itself."""
    copier: Any = made.copier
    if not (copier._pinned and copier._engine.batches):
        raise RuntimeError("the arena is not pinned, or the driver copies no batches")


def gpu() -> dict[str, Any]:
    """Everything that is measured on a GPU."""
    import torch

    step = gpu_step()
    parts: dict[str, Callable[[], Any]] = {
        "by_size_batched": lambda: by_size("cuda", in_batches),
        "by_size_one_by_one": lambda: by_size("cuda", one_by_one),
        "by_piece": lambda: by_piece("cuda"),
        "beside_batched": lambda: beside("cuda", step, in_batches),
        "beside_one_by_one": lambda: beside("cuda", step, one_by_one),
        "pinning": pinning,
    }
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name()}
    for name, measure in parts.items():
        began_s = time.monotonic()
        try:
            found[name] = measure()
        except (RuntimeError, OSError) as error:  # what this machine cannot do does not end the rest
            found[name] = f"{type(error).__name__}: {error}"
        print(name, f"{time.monotonic() - began_s:.1f} s", flush=True)
    return found


def _timed(what: Callable[[], object]) -> float:
    began_s = time.monotonic()
    what()
    return time.monotonic() - began_s
