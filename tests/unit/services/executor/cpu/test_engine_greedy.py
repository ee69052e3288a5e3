"""The default model gives the reference ids of transformers, alone, in a batch, and run ahead: in float32
and with weights in the blocks of the file. The first prompt asks for the capital of France."""

from __future__ import annotations

import pytest
from support.default_model import default_engine, greedy_cases
from support.executor.plan_maker import GREEDY, PlanMaker, Row

import kernels.cpu_jit
from services.executor.cpu.engine import TorchBackend
from shared.messages import ints

STOP = ints([2])
ALONE = 24  # tokens of a prompt alone; two answers are shorter and end by themselves


@pytest.fixture(scope="module", params=["f32", "packed"])
def backend(request: pytest.FixtureRequest) -> TorchBackend:
    if request.param == "packed" and not kernels.cpu_jit.has(*kernels.cpu_jit.BYTES):
        pytest.skip("kernels of packed weights need a CPU with AVX2 and F16C")
    return default_engine(dtype=request.param)


def test_five_prompts_in_one_batch_with_chunks_and_early_ends(backend: TorchBackend) -> None:
    backend.reset()
    maker = PlanMaker(backend)
    cases = dict(enumerate(greedy_cases()))
    for slot, case in cases.items():
        maker.open(slot, case.prompt, GREEDY, stop_ids=STOP, max_length=len(case.prompt) + 64)
    maker.run([Row(slot, 0, 20) for slot in cases])
    last = [Row(slot, 20, len(case.prompt) - 20, feeds=(slot,)) for slot, case in cases.items()]
    firsts = maker.run(last).ids
    more = maker.decode({slot: len(case.prompt) + 1 for slot, case in cases.items()}, 63)
    for slot, case in cases.items():
        found = [firsts[slot], *more[slot]]
        assert found == case.output + [-1] * (64 - len(case.output))


@pytest.mark.parametrize("index", range(5))
def test_prompt_alone_gives_the_reference_ids(backend: TorchBackend, index: int) -> None:
    backend.reset()
    maker = PlanMaker(backend, seed=index)
    case = greedy_cases()[index]
    maker.open(11, case.prompt, GREEDY, stop_ids=STOP)
    first = maker.prefill({11: len(case.prompt)}).ids[0]
    wanted = case.output[:ALONE]
    assert [first, *maker.decode({11: len(case.prompt) + 1}, len(wanted) - 1)[11]] == wanted


@pytest.mark.skipif(not kernels.cpu_jit.has(*kernels.cpu_jit.BYTES), reason="no AVX2: `auto` is f32")
def test_the_default_for_a_gguf_file_names_the_capital_of_france() -> None:
    """With inputs in 8 bits the model goes on in French on some CPUs, and for ever."""
    backend, case = default_engine(dtype="packed"), greedy_cases()[0]
    maker = PlanMaker(backend)
    maker.open(0, case.prompt, GREEDY, stop_ids=STOP)
    first = maker.prefill({0: len(case.prompt)}).ids[0]
    assert [first, *maker.decode({0: len(case.prompt) + 1}, len(case.output) - 1)[0]] == case.output
