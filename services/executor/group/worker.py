"""The process of every rank but the driver: does what it is told, in order, until its pipe closes.

    reader thread:  commands off the pipe; its end is the driver's end: the process goes, wherever it is
    main thread:    slots and steps
    copy thread:    copies, each after the commands that came before it

`python -m services.executor.group.worker FD RANK`, started by services.executor.group.driver.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection

from services.executor.checkpoint.loader import device_of
from services.executor.engine import Pending
from services.executor.group.driver import (
    AttachArena,
    CloseSlot,
    Command,
    Control,
    CopyCommand,
    CopyControl,
    CopyReply,
    DropStep,
    JoinGroup,
    LastError,
    MoveBlocks,
    RankBackend,
    RankCopier,
    Sampled,
    SetSampled,
    rank_builder,
)
from services.executor.host_thread import MAX_PENDING, HostThread
from services.executor.kv_transfer.worker import RECENT_US, REST
from services.executor.parallel.ranks import Ranks, join
from services.executor.sampling.logits_processors import load_processors
from shared import config, processes
from shared.errors import EngineError
from shared.messages import SlotOpen, StepPlan

log = logging.getLogger("headrace.executor")

REFUSED_TIMEOUT_S = 10.0  # the driver refuses what this rank has refused, or waits for it in vain

Copy = Callable[[CopyCommand], None]


class Worker:
    """One rank's engine under commands; with `sampler` it is the last stage of a pipeline."""

    def __init__(self, backend: RankBackend, copy: Copy, sampler: SampleThread | None = None) -> None:
        self._backend, self._copy, self._sampler = backend, copy, sampler
        self._pending: dict[int, Pending] = {}  # by step
        self.refused = 0  # a step that this rank could not compute, and the driver has not said so yet
        self.stepped_s = -RECENT_US / 1e6  # when the last step came

    def execute(self, order: Command) -> None:
        """Carry an order out. What it raises this rank cannot answer for."""
        match order:
            case StepPlan():
                self.stepped_s = time.monotonic()
                self._forward(order)
            case SetSampled(step, ids, done):
                if self._sampler is None:  # the last stage has chosen them itself
                    self._backend.take(self._pending.pop(step), ids, done)
            case DropStep(step=step):
                self._pending.pop(step, None)
                self.refused = 0 if step == self.refused else self.refused
            case SlotOpen():
                self._open(order)
            case CloseSlot(slot=slot):
                self._backend.close_slot(slot)
            case Control.WARM_UP:
                self._backend.warm_up()
            case Control.RESET:
                self._pending.clear()
                self._backend.reset()
            case AttachArena() | MoveBlocks() | CopyControl():
                self._copy(order)

    def _forward(self, plan: StepPlan) -> None:
        try:
            pending = self._backend.forward(plan)
        except EngineError as error:
            log.warning("step %d is refused: %s", plan.step, error)
            self.refused = plan.step
            return
        if self._sampler is None:
            self._pending[plan.step] = pending
        else:
            self._sampler.put(pending)

    def _open(self, opened: SlotOpen) -> None:
        try:
            self._backend.open_slot(opened)
        except Exception as error:  # noqa: BLE001 - of the driver, too, which opens a stand-in; or steps fail
            log.warning("slot %d is refused: %s", opened.slot, error)


class SampleThread:
    """Samples the steps of a pipeline's last stage on a thread of its own, and sends what it has chosen. The
    driver waits for that before it does anything else with the slots of a step."""

    def __init__(
        self, backend: RankBackend, report: Callable[[Sampled], None], enter: Callable[[], None], stages: int
    ) -> None:
        """`enter` is called on the thread first."""
        self._backend, self._tell, self._enter = backend, report, enter
        self._lane = HostThread(max(MAX_PENDING, stages))

    def put(self, pending: Pending) -> None:
        """Sample a step. Waits while as many as there are stages are here."""
        self._lane.put((), 0, lambda: self._sample(pending))

    def _sample(self, pending: Pending) -> None:
        step = pending.plan.step
        try:
            self._enter()
            done = Sampled(step, self._backend.sample(pending))
        except Exception as error:  # noqa: BLE001 - the driver must not wait for ever
            done = Sampled(step, None, f"{type(error).__name__}: {error}")
        self._tell(done)


class CopyThread:
    """Carries copies out beside the steps, and answers."""

    def __init__(
        self, copier: RankCopier, answer: Callable[[CopyReply], None], enter: Callable[[], None]
    ) -> None:
        """`enter` is called on the thread first."""
        self._copier, self._reply, self._enter = copier, answer, enter
        self._commands: queue.SimpleQueue[CopyCommand] = queue.SimpleQueue()
        self.put = self._commands.put
        self.stepped_s: Callable[[], float] = lambda: -RECENT_US / 1e6  # when the last step came
        threading.Thread(target=self._run, name="copies", daemon=True).start()

    def _run(self) -> None:
        self._enter()
        while True:
            order = self._commands.get()
            if isinstance(order, MoveBlocks):
                self._copier.move(order)
                continue
            try:
                self._reply(CopyReply(self._settle(order)))
            except Exception as error:  # noqa: BLE001 - the driver must not wait for ever
                self._reply(CopyReply(error=f"{type(error).__name__}: {error}"))

    def _settle(self, order: AttachArena | CopyControl) -> int:
        match order:
            case AttachArena(name=name, generation=generation):
                self._copier.attach(name, generation, self._yield_device)
            case CopyControl.DETACH:
                self._copier.detach()
            case CopyControl.FINISH:
                return self._copier.finish()
        return 0

    def _yield_device(self, took_s: float) -> bool:
        if time.monotonic() - self.stepped_s() < RECENT_US / 1e6:
            time.sleep(REST * took_s)
        return True


def run_worker(pipe: Connection, driver_gone: Callable[[], None], processors: str = "") -> None:
    """Be a rank until the driver says that it is over. `driver_gone` is called when the driver is no more, on
    another thread: this one may be waiting for it. `processors`: the setting, for a rank that samples. Raises
    whatever this rank cannot go on after."""
    commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(pipe, commands, driver_gone), name="commands", daemon=True).start()
    first = commands.get()
    assert isinstance(first, JoinGroup), "the first order says which rank to be"
    options, rank, size = first.options, first.rank, first.size
    device = device_of(options.device, rank)
    enter = _enter(device.type, rank)
    enter()
    ranks: Ranks = join(
        rank, size, first.port, device, ordered=options.deterministic, sums=not options.pipeline
    )
    samples = options.pipeline and rank == size - 1
    start = _one_at_a_time(pipe.send)
    if samples:
        options = replace(options, processors=load_processors(processors), report_grammar=start)
    backend = rank_builder(device.type)(options, ranks)
    sizes = ranks.exchange(backend.info.bytes_per_block)
    copier = RankCopier(backend.copier(), sum(sizes[:rank]))
    copies = CopyThread(copier, start, enter)
    worker = Worker(backend, copies.put, SampleThread(backend, start, enter, size) if samples else None)
    copies.stepped_s = lambda: worker.stepped_s
    serve(worker, commands, REFUSED_TIMEOUT_S)
    backend.close()
    ranks.close()


def serve(worker: Worker, commands: queue.SimpleQueue[Command], timeout_s: float) -> None:
    """Carry out commands until the last. Raises EngineError for a step that only this rank refuses."""
    while True:
        try:
            order = commands.get(timeout=timeout_s if worker.refused else None)
        except queue.Empty:
            raise EngineError(f"it alone cannot compute step {worker.refused}") from None
        if order is Control.END:
            return
        worker.execute(order)


def _read(pipe: Connection, commands: queue.SimpleQueue[Command], driver_gone: Callable[[], None]) -> None:
    try:
        while True:
            commands.put(pipe.recv())
    except (EOFError, OSError):
        driver_gone()


def _one_at_a_time(send: Callable[[object], None]) -> Callable[[object], None]:
    """For a pipe into which several threads speak."""
    sending = threading.Lock()

    def start(what: object) -> None:
        with sending:
            send(what)

    return start


def _enter(device: str, rank: int) -> Callable[[], None]:
    """What a thread that uses the device does first."""
    if device != "cuda":
        return lambda: None
    import torch

    return lambda: torch.cuda.set_device(rank)


def main() -> None:
    """Follow, and end without waiting for anybody: threads, GPUs and the other ranks are left as they are."""
    fd, rank = (int(word) for word in sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM):  # of a terminal's whole group: the driver says when
        signal.signal(number, signal.SIG_IGN)
    settings = config.load().settings
    processes.setup(f"rank {rank}", level=settings.log_level, as_json=settings.log_json)
    pipe = Connection(fd)
    status = 0
    try:
        run_worker(pipe, lambda: os._exit(1), settings.logits_processors)
    except Exception as error:
        log.exception("this rank is at its end")
        pipe.send(LastError(f"{type(error).__name__}: {error}"))
        status = 1
    logging.shutdown()
    os._exit(status)


if __name__ == "__main__":
    main()
