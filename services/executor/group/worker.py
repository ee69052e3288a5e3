"""The process of every rank but the driver executes the driver's commands in order until its pipe closes.

    reader thread:  reads commands; a closed pipe means that the driver died: the process exits at once
    main thread:    slots and steps
    copy thread:    copies, each after the commands before it

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
from services.executor.device_thread import MAX_PENDING, HostThread
from services.executor.engine import Pending
from services.executor.group import driver
from services.executor.kv_transfer.worker import RECENT_US, REST
from services.executor.parallel.ranks import Ranks, join
from services.executor.sampling.logits_processors import load_processors
from shared import config, processes
from shared.errors import EngineError
from shared.messages import SlotOpen, StepPlan

log = logging.getLogger("headrace.executor")

REFUSED_TIMEOUT_S = 10.0  # the driver refuses the same step within this, or waits for this rank in vain

Copy = Callable[[driver.CopyCommand], None]


class Worker:
    """Executes commands on one rank's engine; with `sampler` it is the last stage of a pipeline."""

    def __init__(self, backend: driver.RankBackend, copy: Copy, sampler: SampleThread | None = None) -> None:
        self._backend, self._copy, self._sampler = backend, copy, sampler
        self._pending: dict[int, Pending] = {}  # by step
        self.refused = 0  # a step that this rank refused, until the driver's DropStep
        self.stepped_s = -RECENT_US / 1e6  # when the last step came

    def execute(self, command: driver.Command) -> None:
        """Execute a command. An exception ends this rank."""
        match command:
            case StepPlan():
                self.stepped_s = time.monotonic()
                self._forward(command)
            case driver.SetSampled(step, ids, done, counts):
                if self._sampler is None:  # the last stage chose them itself
                    self._backend.record_choices(self._pending.pop(step), ids, done, counts)
            case driver.DropStep(step=step):
                self._pending.pop(step, None)
                self.refused = 0 if step == self.refused else self.refused
            case SlotOpen():
                self._open(command)
            case driver.CloseSlot(slot=slot):
                self._backend.close_slot(slot)
            case driver.Control.WARM_UP:
                self._backend.warm_up()
            case driver.Control.RESET:
                self._pending.clear()
                self._backend.reset()
            case driver.AttachArena() | driver.MoveBlocks() | driver.CopyControl():
                self._copy(command)

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
        except Exception as error:  # noqa: BLE001 - the driver fails, too, and opens a plain slot; else steps fail
            log.warning("slot %d is refused: %s", opened.slot, error)


class SampleThread:
    """Samples the steps of a pipeline's last stage on another thread, and reports the tokens. The driver
    waits for them before it uses a step's slots again."""

    def __init__(
        self,
        backend: driver.RankBackend,
        report: Callable[[driver.Sampled], None],
        enter: Callable[[], None],
        stages: int,
    ) -> None:
        """`enter` is called on the thread before each step."""
        self._backend, self._report, self._enter = backend, report, enter
        self._thread = HostThread(max(MAX_PENDING, stages))

    def put(self, pending: Pending) -> None:
        """Sample a step. Waits while as many steps as stages are here."""
        self._thread.put((), 0, lambda: self._sample(pending))

    def _sample(self, pending: Pending) -> None:
        step = pending.plan.step
        try:
            self._enter()
            done = driver.Sampled(step, self._backend.sample(pending))
        except Exception as error:  # noqa: BLE001 - the driver must not wait for ever
            done = driver.Sampled(step, None, f"{type(error).__name__}: {error}")
        self._report(done)


class CopyThread:
    """Executes copy commands while steps run, and answers."""

    def __init__(
        self, copier: driver.RankCopier, answer: Callable[[driver.CopyReply], None], enter: Callable[[], None]
    ) -> None:
        """`enter` is called on the thread first."""
        self._copier, self._reply, self._enter = copier, answer, enter
        self._commands: queue.SimpleQueue[driver.CopyCommand] = queue.SimpleQueue()
        self.put = self._commands.put
        self.stepped_s: Callable[[], float] = lambda: -RECENT_US / 1e6  # when the last step came
        threading.Thread(target=self._run, name="copies", daemon=True).start()

    def _run(self) -> None:
        self._enter()
        while True:
            command = self._commands.get()
            if isinstance(command, driver.MoveBlocks):
                self._copier.move(command)
                continue
            try:
                self._reply(driver.CopyReply(self._execute(command)))
            except Exception as error:  # noqa: BLE001 - the driver must not wait for ever
                self._reply(driver.CopyReply(error=f"{type(error).__name__}: {error}"))

    def _execute(self, command: driver.AttachArena | driver.CopyControl) -> int:
        match command:
            case driver.AttachArena(name=name, generation=generation):
                self._copier.attach(name, generation, self._yield_device)
            case driver.CopyControl.DETACH:
                self._copier.detach()
            case driver.CopyControl.FINISH:
                return self._copier.finish()
        return 0

    def _yield_device(self, took_s: float) -> bool:
        if time.monotonic() - self.stepped_s() < RECENT_US / 1e6:
            time.sleep(REST * took_s)
        return True


def run_worker(pipe: Connection, driver_gone: Callable[[], None], processors: str = "") -> None:
    """Join the group as a worker and execute commands until Control.END. `driver_gone` is called when the
    driver has died, on another thread: this one may wait for the driver. `processors`: the setting, for a
    rank that samples. Raises any error that ends this rank."""
    commands: queue.SimpleQueue[driver.Command] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(pipe, commands, driver_gone), name="commands", daemon=True).start()
    first = commands.get()
    assert isinstance(first, driver.JoinGroup), "JoinGroup is the first command"
    options, rank, size = first.options, first.rank, first.size
    device = device_of(options.device, rank)
    enter = _enter(device.type, rank)
    enter()
    ranks: Ranks = join(
        rank, size, first.port, device, ordered=options.deterministic, sums=not options.pipeline
    )
    samples = options.pipeline and rank == size - 1
    send = _one_at_a_time(pipe.send)
    if samples:
        options = replace(options, processors=load_processors(processors), report_grammar=send)
    backend = driver.rank_builder(device.type)(options, ranks)
    sizes = ranks.exchange(backend.info.bytes_per_block)
    copier = driver.RankCopier(backend.copier, sum(sizes[:rank]))
    copies = CopyThread(copier, send, enter)
    worker = Worker(backend, copies.put, SampleThread(backend, send, enter, size) if samples else None)
    copies.stepped_s = lambda: worker.stepped_s
    serve(worker, commands, REFUSED_TIMEOUT_S)
    backend.close()
    ranks.close()


def serve(worker: Worker, commands: queue.SimpleQueue[driver.Command], timeout_s: float) -> None:
    """Execute commands until Control.END. Raises EngineError for a step that only this rank refuses."""
    while True:
        try:
            command = commands.get(timeout=timeout_s if worker.refused else None)
        except queue.Empty:
            raise EngineError(f"only this rank cannot compute step {worker.refused}") from None
        if command is driver.Control.END:
            return
        worker.execute(command)


def _read(
    pipe: Connection, commands: queue.SimpleQueue[driver.Command], driver_gone: Callable[[], None]
) -> None:
    try:
        while True:
            commands.put(pipe.recv())
    except (EOFError, OSError):
        driver_gone()


def _one_at_a_time(send: Callable[[object], None]) -> Callable[[object], None]:
    """`send` under a lock, for several threads."""
    sending = threading.Lock()

    def locked(message: object) -> None:
        with sending:
            send(message)

    return locked


def _enter(device: str, rank: int) -> Callable[[], None]:
    """The first call of a thread that uses the device."""
    if device != "cuda":
        return lambda: None
    import torch

    return lambda: torch.cuda.set_device(rank)


def main() -> None:
    """Run the worker, then exit without waiting for threads, the GPU or other ranks."""
    fd, rank = (int(word) for word in sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal's signals reach the whole group
        signal.signal(number, signal.SIG_IGN)
    settings = config.load().settings
    processes.setup(f"rank {rank}", level=settings.log_level, as_json=settings.log_json)
    pipe = Connection(fd)
    status = 0
    try:
        run_worker(pipe, lambda: os._exit(1), settings.logits_processors)
    except Exception as error:
        log.exception("this rank ends with an error")
        pipe.send(driver.LastError(f"{type(error).__name__}: {error}"))
        status = 1
    logging.shutdown()
    os._exit(status)


if __name__ == "__main__":
    main()
