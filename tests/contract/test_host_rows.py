"""Rows with logits processors, on both engines: tokens, overlap, and failures that stay in their row."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.executor.engine_pair import KIND, PROMPT, WITHIN_S, Driven, Make, Watched, small_engine
from support.executor.plan_maker import PlanMaker, Row
from support.executor.tiny_models import save_tiny

from services.executor.engine import Backend, MakeProcessor
from shared.messages import Sampling

HOT = Sampling(temperature=1.5)
Body = Callable[[Sequence[int], torch.Tensor], torch.Tensor]


class Plugin:
    """A processor of a plain function."""

    def __init__(self, body: Body) -> None:
        self.process = body


def plugin(body: Body) -> MakeProcessor:
    return lambda args, prompt: Plugin(body)


def spec(name: str, **args: object) -> str:
    return json.dumps({"name": name, "args": args})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(KIND, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(params=["sim", "torch"])
def make(request: pytest.FixtureRequest, folder: Path) -> Make:
    return lambda processors: small_engine(request.param, folder, processors)


@pytest.fixture
def drive() -> Iterator[Callable[[Backend | Watched], Driven]]:
    """Device threads that end with the test."""
    driven: list[Driven] = []

    def start(backend: Backend | Watched) -> Driven:
        driven.append(Driven(backend))
        return driven[-1]

    yield start
    for each in driven:
        each.end()


def first(slot: int) -> Row:
    return Row(slot, 0, len(PROMPT), feeds=(slot,))


def later(slot: int, token: int) -> Row:
    """The row that chooses generated token `token`."""
    return Row(slot, len(PROMPT) + token - 1, 1, True, (slot,))


def alone(make: Make, slot: int, tokens: int) -> list[int]:
    """What the sequence of a slot generates in an engine of its own, without processors."""
    maker = PlanMaker(make({}))
    maker.open(slot, PROMPT, HOT, seed=slot)
    start = maker.prefill({slot: len(PROMPT)}).ids[0]
    return [start, *maker.decode({slot: len(PROMPT) + 1}, tokens - 1)[slot]]


def halves(driven: Driven, names: tuple[str, ...], rounds: int) -> dict[int, list[int]]:
    """The tokens of six slots, three in each half: a half is planned when its result is in, with the other
    half's step under way. Slot 5 has no processor."""
    tokens: dict[int, list[int]] = {slot: [] for slot in range(6)}
    for slot in tokens:
        asked = () if slot == 5 else tuple(spec(name) for name in names)
        driven.maker.open(slot, PROMPT, HOT, seed=slot, processors=asked)
    for half in (0, 1):
        driven.put(*(first(slot) for slot in (3 * half, 3 * half + 1, 3 * half + 2)))
    for step in range(2, 2 * rounds + 2):
        result = driven.result()
        assert (result.step, result.error, result.row_errors) == (step - 1, "", ())
        members = range(3 * (step % 2), 3 * (step % 2) + 3)
        for slot, token in zip(members, result.ids, strict=True):
            tokens[slot].append(token)
        if step < 2 * rounds:
            driven.put(*(later(slot, step // 2) for slot in members))
    return tokens


@pytest.mark.parametrize("names", [("same",), ("same", "copy"), ("same", "slow")])
def test_tokens_through_the_host_thread_equal_tokens_without_it(
    make: Make, drive: Callable[[Backend], Driven], names: tuple[str, ...]
) -> None:
    class Slow(Plugin):
        waits = True

        def __init__(self, args: dict[str, Any], prompt: Sequence[int]) -> None:
            super().__init__(lambda generated, logits: logits)

    known = {
        "same": plugin(lambda generated, logits: logits),
        "copy": plugin(lambda generated, logits: logits.clone()),
        "slow": Slow,
    }
    found = halves(drive(make(known)), names, 5)
    assert found == {slot: alone(make, slot, 5) for slot in range(6)}


def test_one_halfs_host_work_runs_under_the_others_forward(
    make: Make, drive: Callable[[Backend | Watched], Driven]
) -> None:
    """Without overlap the first processor would wait for a forward that comes after it."""
    seen: list[bool] = []
    watched: list[Watched] = []

    def meet(generated: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(watched[0].forwarded(len(seen) + 2).wait(WITHIN_S))
        return logits

    watched.append(Watched(make({"meet": plugin(meet)})))
    driven = drive(watched[0])
    for slot in (0, 1):
        driven.maker.open(slot, PROMPT, HOT, seed=slot, processors=(spec("meet"),))
    driven.put(first(0))
    driven.put(first(1))
    ids = [driven.result().ids[0]]
    driven.put(later(0, 1))
    ids.append(driven.result().ids[0])
    driven.put(later(1, 1))
    driven.maker.open(2, PROMPT)
    last = driven.put(first(2))
    results = [driven.result() for _ in range(3)]
    assert [result.step for result in results] == [3, 4, last]
    assert seen == [True] * 4
    assert [[ids[slot], results[slot].ids[0]] for slot in (0, 1)] == [alone(make, slot, 2) for slot in (0, 1)]


def test_a_processor_sees_its_prompt_its_args_and_what_was_generated(
    make: Make, drive: Callable[[Backend], Driven]
) -> None:
    built: list[tuple[dict[str, Any], list[int]]] = []
    seen: list[list[int]] = []
    threads: set[str] = set()

    def noted(generated: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(list(generated))
        threads.add(threading.current_thread().name)
        assert (logits.dtype, logits.dim(), logits.device.type) == (torch.float32, 1, "cpu")
        return logits

    def build(args: dict[str, Any], prompt: Sequence[int]) -> Plugin:
        built.append((args, list(prompt)))
        return Plugin(noted)

    wanted = alone(make, 1, 3)
    driven = drive(make({"noted": build}))
    opened = [*PROMPT, wanted[0]]  # goes on where another executor stopped
    asked = (spec("noted", words=["a"]),)
    driven.maker.open(1, opened, HOT, seed=1, prompt_tokens=len(PROMPT), processors=asked)
    driven.put(Row(1, 0, len(opened), feeds=(1,)))
    result = driven.result()
    assert (list(result.ids), result.host_us >= 0) == (wanted[1:2], True)
    driven.put(later(1, 2))
    assert list(driven.result().ids) == wanted[2:]
    assert built == [({"words": ["a"]}, PROMPT)]
    assert seen == [wanted[:1], wanted[:2]]
    assert threads == {"host-thread"}


def refuses(args: dict[str, Any], prompt: Sequence[int]) -> Plugin:
    raise KeyError("words")


def leaves(generated: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    sys.exit("bye")


FAILING: dict[str, tuple[MakeProcessor, str]] = {
    "build": (refuses, "logits processor bad: KeyError: 'words'"),
    "raise": (plugin(lambda generated, logits: logits[len(logits)]), "logits processor bad: IndexError: "),
    "exit": (plugin(leaves), "logits processor bad: SystemExit: bye"),
    "shape": (
        plugin(lambda generated, logits: logits[:3]),
        "logits processor bad: ValueError: it returned torch.Size([3]), not a tensor of (",
    ),
    "none": (plugin(lambda generated, logits: None), "it returned NoneType, not a tensor of"),  # type: ignore[arg-type, return-value]  # on purpose
    "nothing_left": (plugin(lambda generated, logits: logits.fill_(-torch.inf)), "no token that may follow"),
    "nan": (plugin(lambda generated, logits: logits / 0 * 0), "ValueError: it left NaN"),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_failing_processor_fails_its_row_alone(
    make: Make, drive: Callable[[Backend], Driven], name: str
) -> None:
    bad, why = FAILING[name]
    driven = drive(make({"bad": bad, "good": plugin(lambda generated, logits: logits)}))
    asked = {0: (), 1: (spec("good"), spec("bad")), 2: (spec("good"),), 3: (spec("missing"),)}
    for slot, processors in asked.items():
        driven.maker.open(slot, PROMPT, HOT, seed=slot, processors=processors)
    driven.put(*(first(slot) for slot in asked))
    one = driven.result()
    wanted = {slot: alone(make, slot, 2) for slot in (0, 2)}
    assert (list(one.ids), list(one.done), one.error) == (
        [wanted[0][0], -1, wanted[2][0], -1],
        [0, 2, 0, 2],
        "",
    )
    (_, reason), (_, missing) = one.row_errors
    assert [row for row, _ in one.row_errors] == [1, 3]
    assert why in reason
    assert "this executor has none of that name" in missing
    driven.put(later(0, 1), later(2, 1))
    assert list(driven.result().ids) == [wanted[0][1], wanted[2][1]]
    for slot in (1, 3):
        driven.close_slot(slot)
        driven.maker.open(slot, PROMPT, HOT, seed=0)
    driven.put(first(1), first(3))
    assert list(driven.result().ids) == [wanted[0][0]] * 2  # the slots are as new


def test_rows_that_wait_wait_side_by_side(make: Make, drive: Callable[[Backend], Driven]) -> None:
    """One after the other, the first would wait for a second that has not begun."""
    together = threading.Barrier(3)

    class Meets(Plugin):
        waits = True

        def __init__(self, args: dict[str, Any], prompt: Sequence[int]) -> None:
            super().__init__(self._meet)

        def _meet(self, generated: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
            together.wait(WITHIN_S)
            return logits.add_(0)

    driven = drive(make({"meets": Meets}))
    for slot in range(3):
        driven.maker.open(slot, PROMPT, HOT, seed=slot, processors=(spec("meets"),))
    driven.put(*(first(slot) for slot in range(3)))
    result = driven.result()
    assert (list(result.ids), result.row_errors) == ([alone(make, slot, 1)[0] for slot in range(3)], ())


def test_processors_come_before_penalties_and_log_probabilities_are_the_models(folder: Path) -> None:
    """A processor that forbids the likeliest token: the second is taken, with its own log probability."""
    plain = PlanMaker(small_engine("torch", folder, {}))
    plain.open(0, PROMPT, logprobs=3)
    before = plain.prefill({0: len(PROMPT)})

    def forbid(generated: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        logits[before.ids[0]] = -torch.inf
        return logits

    maker = PlanMaker(small_engine("torch", folder, {"forbid": plugin(forbid)}))
    maker.open(0, PROMPT, logprobs=3, processors=(spec("forbid"),))
    after = maker.prefill({0: len(PROMPT)})
    assert list(after.ids) == [before.top_ids[1]]
    assert list(after.logprobs) == [before.top_logprobs[1]]
    assert list(after.top_ids) == list(before.top_ids)
