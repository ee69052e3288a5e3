"""Measures the named parts (default: all of one GPU), writes JSON with the device and versions.

Parts of several GPUs, each in a process of its own: tp2, tp4, tp8, pp2, pp4.
"""

from __future__ import annotations

import json
import os
import platform
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import triton

from loadtest.bench.machine import commit
from loadtest.command_line import parser_of
from loadtest.gpu import engine, formats, limits, ranks, rig, speculation, structured

# Engines of their own: there is no room for another one.
OWN = {
    "formats": formats.formats, "experts": formats.experts, "same_ids": speculation.same_ids,
    "copies": speculation.copies, "speculation": speculation.speculation,
}  # fmt: skip
SHARED: dict[str, Callable[[rig.Built, dict[str, float], int], Any]] = {
    "decode": lambda built, floors, _: engine.decode(built, floors),
    "mixed": lambda built, *_: engine.mixed(built),
    "prefill": lambda built, _, step_tokens: engine.prefill(built, step_tokens),
    "structured": lambda built, *_: structured.structured(built.own),
}
ALL_PARTS = (*SHARED, *OWN)


class Bench:
    """The parts, and the engine that some of them share."""

    def __init__(self, step_tokens: int) -> None:
        self._step_tokens = step_tokens
        self._built: rig.Built | None = None
        self.found: dict[str, Any] = {"device": _device(), "limits": limits.limits()}

    def measure(self, name: str) -> Any:
        """One part. Raises ValueError for a name that is none."""
        floors, step_tokens = self.found["limits"], self._step_tokens
        if name[:2] in ("tp", "pp") and name[2:].isdecimal():
            size = int(name[2:])
            return ranks.tp(size, floors, step_tokens) if name[0] == "t" else ranks.pp(size, step_tokens)
        if name in OWN:
            rig.end(self._built)
            self._built = None
            return OWN[name](floors, step_tokens)
        if name not in SHARED:
            raise ValueError(f"there is no part {name!r}: {', '.join(ALL_PARTS)}, tp2, pp2")
        if self._built is None:
            self._built = rig.llama_8b(step_tokens)
            self.found["start"] = {"load_s": self._built.load_s, "warm_up_s": self._built.warm_up_s}
        return SHARED[name](self._built, floors, step_tokens)


def main() -> None:
    """The command line."""
    parser = parser_of("gpu", __doc__)
    parser.add_argument("--parts", default=",".join(ALL_PARTS))
    parser.add_argument("--step-tokens", type=int, default=8192)
    given = parser.parse_args()
    bench = Bench(given.step_tokens)
    for name in given.parts.split(","):
        began_s = time.monotonic()
        try:
            bench.found[name] = bench.measure(name)
        except (RuntimeError, ValueError, AssertionError) as error:  # what fails does not end the rest
            bench.found[name] = f"{type(error).__name__}: {error}"
            print(name, bench.found[name], flush=True)
            traceback.print_exc()
        print(f"{name}: {time.monotonic() - began_s:.1f} s", flush=True)
        torch.cuda.empty_cache()  # the next engine sizes its cache from what is free
        if given.out:
            given.out.write_text(json.dumps(bench.found, indent=1) + "\n")
    os._exit(0)  # libraries of several GPUs may wait for each other at the end, and for ever


def _device() -> dict[str, str | None]:
    return {
        "name": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "cuda": torch.version.cuda, "python": platform.python_version(), "commit": commit(),
    }  # fmt: skip


if __name__ == "__main__":
    main()
