"""A worker under orders, in this process: what it keeps, what it refuses, and how it ends."""

from __future__ import annotations

import multiprocessing
import queue
import threading
from typing import Any

import pytest
from support.executor.empty_plans import plan
from support.executor.engine_pair import KIND, PROMPT
from support.executor.plan_maker import PlanMaker, Row
from support.executor.tiny_models import save_tiny
from support.shm import segment

from services.executor.checkpoint.loader import TorchOptions
from services.executor.cpu.engine import build
from services.executor.engine import Pending, StepOutput
from services.executor.group import driver
from services.executor.group.driver import (
    AttachArena,
    CloseSlot,
    Command,
    Control,
    CopyControl,
    CopyReply,
    DropStep,
    JoinGroup,
    MoveBlocks,
    RankCopier,
    Sampled,
    SetSampled,
    for_workers,
)
from services.executor.group.worker import CopyThread, SampleThread, Worker, run_worker, serve
from services.executor.parallel.ranks import rendezvous
from shared.errors import EngineError
from shared.messages import Ints, Sampling, SlotOpen, StepPlan, ints

WITHIN_S = 60.0


class Engine:
    """Writes down what it is asked for; refuses the steps in `refuses`."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.refuses: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.calls.append((name, given))

    def forward(self, plan: StepPlan) -> Pending:
        if plan.step in self.refuses:
            raise EngineError("no such slot")
        return Pending(plan=plan)

    def record_choices(self, pending: Pending, ids: Ints, done: Ints, counts: Ints) -> None:
        self.calls.append(("take", (pending.plan.step, list(ids), list(done))))


def served(*given: Command, engine: Engine, patience_s: float = WITHIN_S) -> list[tuple[str, Any]]:
    queued: queue.SimpleQueue[Command] = queue.SimpleQueue()
    for order in given:
        queued.put(order)
    engine_as_rank: Any = engine
    serve(Worker(engine_as_rank, lambda order: engine.calls.append(("copy", order))), queued, patience_s)
    return engine.calls


def test_orders_are_carried_out_in_their_order() -> None:
    took = SetSampled(3, ints([7]), ints([1]))
    found = served(
        Control.WARM_UP, plan(3), plan(4), took, CopyControl.FINISH, CloseSlot(2), Control.RESET,
        Control.END, engine=Engine(),
    )  # fmt: skip
    assert found == [
        ("warm_up", ()),
        ("take", (3, [7], [1])),
        ("copy", CopyControl.FINISH),
        ("close_slot", (2,)),
        ("reset", ()),
    ]


def test_a_step_that_the_leader_refuses_too_is_over() -> None:
    engine = Engine()
    engine.refuses = {3}
    took = SetSampled(4, ints([1]), ints([0]))
    assert served(plan(3), DropStep(3), plan(4), took, Control.END, engine=engine) == [
        ("take", (4, [1], [0]))
    ]


def test_a_step_that_only_this_rank_refuses_is_its_end() -> None:
    engine = Engine()
    engine.refuses = {3}
    with pytest.raises(EngineError, match="only this rank cannot compute step 3"):
        served(plan(2), plan(3), DropStep(2), engine=engine, patience_s=0.01)


def test_a_step_that_was_not_sampled_is_forgotten() -> None:
    with pytest.raises(KeyError):
        served(plan(3), DropStep(3), SetSampled(3, ints(), ints()), engine=Engine())


def test_last_stage_sends_its_tokens_and_its_errors() -> None:
    sampled: queue.SimpleQueue[Sampled] = queue.SimpleQueue()
    entered: list[str] = []

    class Samples(Engine):
        def sample(self, pending: Pending) -> StepOutput:
            if pending.plan.step == 4:
                raise ValueError("no more words")
            return StepOutput(ids=ints([pending.plan.step]), done=ints([0]))

    engine: Any = Samples()
    engine.refuses = {5}
    sampler = SampleThread(engine, sampled.put, lambda: entered.append("here"), stages=2)
    last = Worker(engine, lambda order: None, sampler)
    for order in (plan(3), plan(4), plan(5), DropStep(5), SetSampled(3, ints([3]), ints([0])), plan(6)):
        last.execute(order)
    found = [sampled.get(timeout=WITHIN_S) for _ in range(3)]
    assert [(each.step, each.error) for each in found] == [(3, ""), (4, "ValueError: no more words"), (6, "")]
    assert found[0].output is not None
    assert list(found[0].output.ids) == [3]
    assert found[1].output is None
    assert (entered, engine.calls) == (["here"] * 3, [])


def test_followers_receive_nothing_that_only_the_leader_runs() -> None:
    plain = SlotOpen(slot=1, generation=0, seq=0, prompt_tokens=1, tokens=ints([1]))
    assert for_workers(plain) is plain
    hosted = SlotOpen(
        slot=1, generation=0, seq=0, prompt_tokens=1, tokens=ints([1]), grammar="{}", processors=("x",)
    )
    bare = for_workers(hosted)
    assert (bare.grammar, bare.processors, bare.logprobs) == ("", (), 1)


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> TorchOptions:
    folder = save_tiny(KIND, tmp_path_factory.mktemp("tiny"))
    return TorchOptions(
        model_path=folder, model_name=KIND, device="cpu", dtype="f32", blocks=20, slots=4, threads=1
    )


def test_part_of_a_rank_lies_after_the_parts_of_the_ranks_before(options: TorchOptions) -> None:
    backend = build(options)
    size, before = backend.info.bytes_per_block, 24
    maker = PlanMaker(backend)
    maker.open(0, PROMPT)
    maker.prefill({0: len(PROMPT)})
    answers: queue.SimpleQueue[CopyReply] = queue.SimpleQueue()
    thread = CopyThread(RankCopier(backend.copier, before), answers.put, lambda: None)
    with segment(2 * size) as file:
        for order in (
            AttachArena(file.name, file.generation),
            MoveBlocks(True, [maker.tables[0][0]], [8]),
            CopyControl.FINISH,
        ):
            thread.put(order)
        assert [answers.get(timeout=WITHIN_S) for _ in range(2)] == [CopyReply(), CopyReply()]
        block = backend._cache.tensor[maker.tables[0][0]].numpy().tobytes()
        assert file.read()[before + 8 :].startswith(block)
        assert set(file.read()[: before + 8]) == {0xA5}
        thread.put(MoveBlocks(False, [0], [2 * size]))  # beyond the end
        thread.put(CopyControl.FINISH)
        assert "ValueError" in answers.get(timeout=WITHIN_S).error
        for _ in range(2):  # a second time there is nothing to let go of
            thread.put(CopyControl.DETACH)
            assert answers.get(timeout=WITHIN_S) == CopyReply()
    thread.put(AttachArena(file.name, file.generation))
    assert "cannot open the arena" in answers.get(timeout=WITHIN_S).error


def test_rank_is_built_works_and_ends_by_the_drivers_commands(options: TorchOptions) -> None:
    """The only one of its group, on a thread: its own driver, since no other rank computes."""
    ours, theirs = multiprocessing.Pipe()
    store = rendezvous(1)
    orphaned = threading.Event()
    thread = threading.Thread(target=run_worker, args=(theirs, orphaned.set), daemon=True)
    thread.start()
    maker = PlanMaker(build(options))
    opened = SlotOpen(
        slot=0, generation=0, seq=0, prompt_tokens=len(PROMPT), tokens=ints(PROMPT), sampling=Sampling()
    )
    maker.tables[0] = []
    refused = SlotOpen(slot=99, generation=0, seq=0, prompt_tokens=1, tokens=ints([1]))
    for order in (
        JoinGroup(options, 0, 1, store.port),
        opened,
        refused,
        maker.plan([Row(0, 0, len(PROMPT), feeds=(0,))]),
        SetSampled(1, ints([5]), ints([0])),
        maker.plan([Row(0, len(PROMPT), 1, feeds=(0,))]),  # of the token that it received
        SetSampled(2, ints([6]), ints([1])),
        driver.CopyControl.FINISH,
    ):
        ours.send(order)
    assert ours.poll(WITHIN_S)
    assert ours.recv() == CopyReply()
    ours.send(Control.END)
    thread.join(WITHIN_S)
    assert not thread.is_alive()
    assert not orphaned.is_set()
    ours.close()
    assert orphaned.wait(WITHIN_S)
