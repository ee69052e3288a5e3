"""Executors and detokenizers come and go; what they held is rebuilt from the scheduler's record."""

from __future__ import annotations

from services.scheduler import closing, intake, results
from services.scheduler.leaving import wait_again
from services.scheduler.ledger import Ledger
from services.scheduler.records import Sequence
from services.scheduler.state import Executor, State
from services.scheduler.tiers import fleet as tiers
from shared.messages import Close, ExecHello, ExecReset, ExecWelcome, StepResult


def hello(state: State, source: str, message: ExecHello) -> None:
    """An executor with empty slots. A repeated hello of a known incarnation is only welcomed."""
    if source != f"executor.{message.executor}":
        return  # it speaks for another
    known, epoch = state.executors.get(message.executor), message.exec_epoch
    if known is None or known.epoch != epoch:
        if known is not None:
            drop_executor(state, message.executor, "the executor restarted")
        ledger = Ledger(blocks=message.blocks, slots=message.slots, block_tokens=message.block_tokens)
        state.executors[message.executor] = executor = Executor(message, epoch, ledger)
        tiers.joined(state, executor)
        state.waiting.unpark(state.now_us)
        state.stuck = ()  # the new one may have the same numbers as the old
    state.dropped.pop(message.executor, None)
    state.send(source, ExecWelcome(exec_epoch=epoch))


def step_result(state: State, source: str, result: StepResult) -> None:
    """Apply a result of a known incarnation; a forgotten one is told to start over."""
    executor = state.executors.get(source.removeprefix("executor."))
    if executor is not None and executor.epoch == result.exec_epoch:
        if results.fits(executor, result):
            results.take(state, executor, result)
        else:
            reset_executor(state, executor.hello.executor, "its result does not fit its plan")
    elif executor is None:
        state.send(source, ExecReset(exec_epoch=result.exec_epoch, why="the scheduler has forgotten it"))


def executor_back(state: State, executor_id: str) -> None:
    """An executor that had been given up beats again: its slots are stale, it must start over."""
    epoch = state.dropped.get(executor_id)
    if epoch is not None:
        state.send(f"executor.{executor_id}", ExecReset(exec_epoch=epoch, why="it was given up for dead"))


def drop_executor(state: State, executor_id: str, why: str) -> None:
    """The executor's memory is gone: its sequences wait again, with all their tokens."""
    executor = state.executors.pop(executor_id, None)
    if executor is None:
        return
    state.dropped[executor_id] = executor.epoch
    tiers.executor_gone(state, executor)
    for sequence in executor.running:
        sequence.leave()
        sequence.decide(state.now_us, "requeue", why, tokens=len(sequence.tokens))
        wait_again(state, sequence)


def reset_executor(state: State, executor_id: str, why: str) -> None:
    """Make an executor that cannot be trusted start over as a new incarnation."""
    executor = state.executors.get(executor_id)
    if executor is not None:
        state.send(executor.source, ExecReset(exec_epoch=executor.epoch, why=why))
        drop_executor(state, executor_id, why)


def detokenizer_ready(state: State, shard: str, epoch: int) -> None:
    """A detokenizer, or a new incarnation of one: it gets the orphans, and its own back. One that
    had been given up and still lives is told which sequences are no longer its own."""
    moved_epoch, moved = state.moved.pop(shard, (0, []))
    if moved_epoch == epoch:
        for seq in moved:
            state.send(f"detokenizer.{shard}", Close(seq=seq, final=0, reason="moved"))
    state.leaving.discard(shard)
    restarted = state.detokenizers.get(shard, epoch) != epoch
    state.detokenizers[shard] = epoch
    for request in list(state.requests.values()):
        if not request.shard or (restarted and request.shard == shard):
            _reopen(state, request.sequences)


def detokenizer_leaves(state: State, shard: str) -> None:
    """It gets no new request; those whose scheduler has died may go on there."""
    state.detokenizers.pop(shard, None)
    state.leaving.add(shard)


def detokenizer_lost(state: State, shard: str) -> None:
    """Its sequences are opened at another one with all their tokens, or wait for one."""
    state.leaving.discard(shard)
    epoch = state.detokenizers.pop(shard, 0)
    lost = [request for request in state.requests.values() if request.shard == shard]
    state.moved[shard] = (epoch, [s.seq for request in lost for s in request.sequences])
    for request in lost:
        _reopen(state, request.sequences)


def detokenizer_missed(state: State, source: str) -> None:
    """Messages to a detokenizer were lost. It has ended and named what it knew; the requests it did not
    name it may never have heard of, and nobody would tell their clients."""
    for request in list(state.requests.values()):
        if source == f"detokenizer.{request.shard}" and not request.detached:
            request.attempt += 1
            intake.open_at_shard(state, request)
            close_again(state, request.sequences)


def _reopen(state: State, sequences: list[Sequence]) -> None:
    """A new attempt of the reply stream, from the first token on."""
    request = sequences[0].request
    if state.detokenizers:
        request.attempt += 1
    intake.assign_shard(state, request)
    close_again(state, sequences)


def close_again(state: State, sequences: list[Sequence]) -> None:
    """Sequences that have been opened again, and are over: send their Close again, too."""
    for sequence in sequences:
        if not sequence.live:
            closing.send_close(state, sequence)
