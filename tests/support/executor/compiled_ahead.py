"""Compiles two kernels ahead for an H100, twice, and prints what came of it, as JSON.

A process of its own: Triton's interpreter, which the tests turn on, leaves nothing to compile."""

from __future__ import annotations

import json
from types import SimpleNamespace

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kernels.elementwise.gpu import move, scatter
from services.executor.cuda.compile_ahead import compile_ahead


def main() -> None:
    """Kernels that were new, each time; whether they wrote anything; whether they are launched again."""
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
        )
    )
    run, compiled = JITFunction.run, list[str]()
    knobs.compilation.listener = lambda *, src, **more: compiled.append(src.name)
    source, target = torch.arange(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)

    def launch() -> None:
        move(source, target)
        move(source, target)
        scatter(source, source, target)

    new = [compile_ahead(launch), compile_ahead(launch)]
    restored = JITFunction.run is run and knobs.compilation.listener is not None
    print(
        json.dumps(
            {"new": new, "compiled": sorted(compiled), "target": target.tolist(), "restored": restored}
        )
    )


if __name__ == "__main__":
    main()
