"""Engines of several ranks for tests: made, watched, used and killed."""

from __future__ import annotations

import os
import signal
import threading
from array import array
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from support.default_model import greedy_cases
from support.executor.engine_pair import KIND, PROMPT
from support.executor.plan_maker import GREEDY, Drafted, PlanMaker, Row
from support.shm import segment

from services.executor.checkpoint.loader import TorchOptions
from services.executor.engine import Arena, Backend
from services.executor.group.driver import GroupBackend, build_group
from shared.errors import EngineError
from shared.messages import WHOLE_VECTOR, Sampling, ints

FIRST = 8  # tokens of an answer
DEFAULT: dict[str, Any] = {"blocks": 200, "slots": 20, "max_context": 512, "deterministic": False}
HOT = Sampling(temperature=1.5)
PENALISED = Sampling(temperature=1.2, top_k=40, presence_penalty=0.5, repetition_penalty=1.1)
WITHIN_S = 60.0


def options(folder: Path, **more: Any) -> TorchOptions:
    usual = {"dtype": "f32", "device": "cpu", "blocks": 80, "slots": 8, "threads": 1, "deterministic": True}
    usual["max_drafts"] = 8
    return TorchOptions(model_path=folder, model_name=KIND, **{**usual, **more})


class Watched:
    """A group, and its last message when it was lost."""

    def __init__(self, made: TorchOptions, size: int = 2, **environment: str) -> None:
        self.lost: SimpleQueue[str] = SimpleQueue()
        self.group: GroupBackend = build_group(made, size, self.lost.put, environment)


def life(maker: PlanMaker) -> list[list[int]]:
    """Ids and done columns of five sequences: sampled in every way, with stops, host-fed and device-fed."""
    end = len(PROMPT) + 7
    maker.open(0, PROMPT, HOT, seed=1)
    maker.open(1, PROMPT[3:], PENALISED, seed=2)
    maker.open(2, PROMPT[5:], GREEDY, logprobs=3)
    maker.open(3, PROMPT, HOT, seed=4, max_length=end)
    maker.open(4, PROMPT[1:], HOT, seed=5, processors=('{"name": "shift", "args": {"by": 7}}',))
    lengths = {slot: len(PROMPT) - skip for slot, skip in enumerate((0, 3, 5, 0, 1))}
    maker.run([Row(slot, 0, 9) for slot in lengths])
    found = [maker.run([Row(slot, 9, count - 9, feeds=(slot,)) for slot, count in lengths.items()])]
    for turn in range(10):
        fed = {s: s == 3 or turn % 3 > 0 for s in lengths}  # the record of one that is done has ended
        rows = [Row(s, count + turn, 1, fed[s], (s,)) for s, count in lengths.items()]
        found.append(maker.run(rows))
    return [list(column) for output in found for column in (output.ids, output.done)]


def drafts_change_no_token(group: GroupBackend) -> None:
    """With drafts, most of which are right, a group's ids are those without; penalties and a processor are
    chosen place after place."""
    shift = {"processors": ('{"name": "shift", "args": {"by": 7}}',)}
    cases: list[tuple[Sampling, dict[str, Any]]] = [(HOT, {}), (GREEDY, {}), (PENALISED, {}), (HOT, shift)]

    def generated(most: int, predictions: dict[int, list[int]]) -> Drafted:
        group.reset()
        maker = PlanMaker(group)
        for slot, (sampling, more) in enumerate(cases):
            prediction = ints(predictions.get(slot, ()))
            end = len(PROMPT) + 20
            maker.open(slot, PROMPT, sampling, seed=slot, max_length=end, prediction=prediction, **more)
        first = maker.prefill(dict.fromkeys(range(len(cases)), len(PROMPT)))
        found = maker.decode_with_drafts(dict.fromkeys(range(len(cases)), len(PROMPT) + 1), 19, most)
        for slot, ids in found.ids.items():
            ids.insert(0, first.ids[slot])
        return found

    plain = generated(0, {})
    wrong = {s: [1 if at % 6 == 5 else token for at, token in enumerate(ids)] for s, ids in plain.ids.items()}
    found = generated(5, wrong)
    assert found.ids == plain.ids
    assert min(found.kept.values()) > 0
    assert found.steps < plain.steps


def go_down_and_come_back(group: GroupBackend) -> None:
    """The blocks of a sequence; it goes on from others with what was brought back as it would have."""
    size, copier = group.info.bytes_per_block, group.copier
    maker = PlanMaker(group)
    maker.open(0, PROMPT, HOT, seed=3)
    first = maker.prefill({0: len(PROMPT)}).ids[0]
    table = maker.tables[0]
    rest = maker.decode({0: len(PROMPT) + 1}, 4)[0]
    with segment(4 * size) as file:
        arena = Arena(file.name, file.generation)
        copier.attach(arena)
        copier.store(table, [2 * size, 0])
        assert copier.finish() >= 0
        assert {*file.read()[: size - 8 : 8]} != {0}
        group.reset()
        maker = PlanMaker(group, seed=8)  # other blocks, but for chance
        blocks = [block for block in maker.free if block not in table][:2]
        copier.load(blocks, [2 * size, 0])
        copier.finish()
        maker.open(1, [*PROMPT, first], HOT, seed=3, prompt_tokens=len(PROMPT))
        maker.set_table(1, blocks)
        second = maker.run([Row(1, len(PROMPT), 1, feeds=(1,))]).ids[0]
        assert [second, *maker.decode({1: len(PROMPT) + 2}, 3)[1]] == rest
        copier.detach()
        arena.close()  # raises where the copier keeps a view of it


def gives_the_vectors_of(made: Watched, alone: Backend) -> None:
    """Vectors beside tokens, as those of one rank."""
    found = []
    for engine in (made.group, alone):
        maker = PlanMaker(engine)
        maker.open(0, PROMPT, HOT, seed=1)
        maker.open(1, PROMPT[3:], GREEDY, pooling=WHOLE_VECTOR)
        maker.open(2, PROMPT[5:], GREEDY, pooling=6)
        maker.run([Row(slot, 0, 9) for slot in range(3)])
        skips = {0: 0, 1: 3, 2: 5}
        output = maker.run([Row(s, 9, len(PROMPT) - skip - 9, feeds=(s,)) for s, skip in skips.items()])
        rest = maker.decode({0: len(PROMPT) + 1}, 4)[0]
        found.append(([*output.ids, *rest], [torch.tensor(array("f", data)) for _, data in output.vectors]))
    (ids, vectors), (wanted_ids, wanted) = found
    assert ids == wanted_ids
    assert [len(each) for each in vectors] == [alone.info.hidden, 6]
    for vector, its in zip(vectors, wanted, strict=True):
        assert torch.allclose(vector, its, atol=1e-5)


def dies_as_one(made: Watched) -> None:
    """One rank is killed, and nothing of the group gives an answer any more."""
    group, maker = made.group, PlanMaker(made.group)
    maker.open(0, PROMPT, GREEDY)
    maker.prefill({0: len(PROMPT)})
    os.kill(group._workers._processes[0].pid, signal.SIGKILL)
    assert "rank 1 is gone" in made.lost.get(timeout=WITHIN_S)
    step = in_thread(lambda: maker.run([Row(0, len(PROMPT), 1, True, (0,))]))
    with pytest.raises(EngineError, match="rank 1 is gone"):
        group.copier.finish()
    with pytest.raises(EngineError, match="rank 1 is gone"):  # and again
        group.copier.detach()
    assert step.empty()  # a step that no rank can finish has no result, not even an error
    assert made.lost.empty()
    group.close()


def in_thread(call: Callable[[], object]) -> SimpleQueue[object]:
    """Its answer, should there be one."""
    answered: SimpleQueue[object] = SimpleQueue()
    threading.Thread(target=lambda: answered.put(call()), daemon=True).start()
    return answered


def gives_the_reference_ids(made: Watched) -> None:
    """The first greedy ids of the default model, all prompts at once; some end before."""
    maker, cases = PlanMaker(made.group), dict(enumerate(greedy_cases()))
    for slot, case in cases.items():
        maker.open(slot, case.prompt, GREEDY, stop_ids=ints([2]), max_length=len(case.prompt) + FIRST)
    maker.run([Row(slot, 0, 20) for slot in cases])
    last = [Row(slot, 20, len(case.prompt) - 20, feeds=(slot,)) for slot, case in cases.items()]
    firsts = maker.run(last).ids
    more = maker.decode({slot: len(case.prompt) + 1 for slot, case in cases.items()}, FIRST - 1)
    for slot, case in cases.items():
        wanted = case.output[:FIRST]
        assert [firsts[slot], *more[slot]] == wanted + [-1] * (FIRST - len(wanted))
    made.group.close()
