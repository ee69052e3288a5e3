"""Stages without a server: steps of an 8B engine on one GPU, of two ranks and of two stages of a pipeline.

Run by `python -m loadtest.two_gpus`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from loadtest.gpu import engine, ranks
from loadtest.gpu.limits import limits
from loadtest.gpu.rig import llama_8b
from loadtest.two_gpus.record import Record

BLOCKS = 20_480  # 256 rows of 1,300 tokens
STEP_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Engine:
    """What is measured in a process."""

    ranks: int
    dtype: str = "bf16"
    batches: tuple[int, ...] = (1, 32, 64, 128)


ENGINES = {
    "one": Engine(1, batches=(1, 32, 64, 128, 256)),
    "one_fp8": Engine(1, "fp8"),
    "one_int4": Engine(1, "int4"),
    "tp2": Engine(2, batches=(1, 32, 64, 128, 256)),
    "tp2_fp8": Engine(2, "fp8"),
    "tp2_int4": Engine(2, "int4"),
}


def decodes(name: str, record: Record) -> None:
    """Decode steps of ENGINES[name] at 1k context, beside the floor of a GPU."""
    wanted = ENGINES[name]
    record.add("limits", found := limits())
    torch.cuda.empty_cache()
    built = llama_8b(STEP_TOKENS, ranks=wanted.ranks, dtype=wanted.dtype, blocks=BLOCKS)
    record.add("start", {"dtype": built.backend.info.dtype, **ranks.start(built)})
    for batch in wanted.batches:
        record.add(f"decode_{batch}", engine.decode(built, found, (batch,))[0])


def pipeline(record: Record) -> None:
    """Decodes of two stages, one and two steps in flight."""
    built = llama_8b(STEP_TOKENS, ranks=2, pipeline=True, blocks=BLOCKS)
    record.add("start", ranks.start(built))
    record.add("prefill", ranks.prefill(built.backend, max(ranks.ROWS), STEP_TOKENS))
    for rows in reversed(ranks.ROWS):
        record.add(f"decode_{rows}", ranks.decode(built.backend, rows))
