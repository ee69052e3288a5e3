"""A short chunk after a long prefix, beside a decode, on every engine that computes: the model's own logits.

On a GPU several programs walk the prefix of such a chunk, launched one by one or by a graph.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from support.executor.engine_pair import ENGINES
from support.executor.plan_maker import PlanMaker, Row
from support.executor.row_by_row import logits
from support.executor.tiny_models import VOCAB, reference_logprobs, save_tiny

from services.executor.checkpoint.loader import TorchOptions
from services.executor.engine import Backend

DTYPES = {"torch": ("f32",), "cuda": ("f32", "bf16", "fp8")}
CASES = [(engine, dtype) for engine in ENGINES for dtype in DTYPES.get(engine, ())]
KINDS = ("llama-9-3-tied", "qwen2")
LONG, CHUNK, SHORT = 230, 6, 40  # tokens
NEAR = {
    "f32": 1e-3,
    "bf16": 0.5,
    "fp8": 3.0,
}  # of bf16 only that it is the same model: `headrace eval kl` measures how near


def engine(name: str, dtype: str, kind: str, folder: Path) -> Backend:
    if name == "cuda":
        from services.executor.cuda.engine import build
    else:
        from services.executor.cpu.engine import build
    options = TorchOptions(
        model_path=save_tiny(kind, folder), model_name=kind, device="cpu" if name == "torch" else name,
        dtype=dtype, blocks=80, slots=8, threads=1, max_step_tokens=256,
    )  # fmt: skip
    return build(options)


@pytest.mark.parametrize(("name", "dtype"), CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_short_chunk_after_a_long_prefix_equals_the_reference(
    name: str, dtype: str, kind: str, tmp_path: Path
) -> None:
    maker = PlanMaker(engine(name, dtype, kind, tmp_path))
    draw = random.Random(9)
    long, short = draw.choices(range(VOCAB), k=LONG), draw.choices(range(VOCAB), k=SHORT)
    wanted = torch.stack((reference_logprobs(kind, short)[-1], reference_logprobs(kind, long)[-1]))

    def assert_near(first: int, second: int) -> None:
        maker.open(first, long, logprobs=1)
        maker.open(second, short, logprobs=1)
        logits(maker, [Row(first, 0, LONG - CHUNK, feeds=(first,))])
        logits(maker, [Row(second, 0, SHORT - 1, feeds=(second,))])
        rows = [
            Row(second, SHORT - 1, 1, feeds=(second,)),
            Row(first, LONG - CHUNK, CHUNK, feeds=(first,)),
        ]
        found = logits(maker, rows).double().log_softmax(-1)
        assert (found - wanted).abs().max() < NEAR[dtype]

    assert_near(0, 1)
    maker.backend.warm_up()
    assert_near(2, 3)
