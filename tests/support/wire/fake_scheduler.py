"""The fake scheduler of the wire test: one step in flight, one executor, one KV host."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from support.wire.fake_state import FakeSequence
from support.wire.fake_steps import Steps
from support.wire.fake_tiers import Tiers
from support.wire.fakes import EXECUTOR

from shared.actor.mailbox import Mailbox
from shared.actor.membership import Peer
from shared.actor.runtime import Actor
from shared.messages import (
    Accepted,
    Close,
    Ended,
    ExecReset,
    Message,
    Open,
    Rejected,
    StopFound,
    Tokenized,
    Usage,
    ints,
)
from shared.nats import subjects
from shared.nats.interface import Delivery


class FakeScheduler(Actor):
    """Everything about every sequence; replies are matched by job, slot and step."""

    kind = "scheduler"

    def __init__(self) -> None:
        self.sequences: dict[int, FakeSequence] = {}
        self.tombstones: set[tuple[str, str]] = set()
        self.pause_after: dict[int, int] = {}  # seq -> generated tokens
        self.steps, self.tiers = Steps(self), Tiers(self)
        self._ids = count(1)

    async def start(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        await mailbox.bus.subscribe(subjects.CANCEL_ALL, lambda d: self.cancel(*cancel_of(d)))

    def receive(self, source: str, message: Message, trace: str) -> None:
        name = f"_on_{type(message).__name__}"
        owner = next(part for part in (self, self.steps, self.tiers) if hasattr(part, name))
        handler: Callable[..., None] = getattr(owner, name)
        handler(source, message)

    def on_stream_lost(self, source: str) -> None:
        if source == EXECUTOR:
            self.mailbox.send(source, ExecReset(exec_epoch=self.steps.exec_epoch, why="results are lost"))

    def on_peer_gone(self, peer: Peer) -> None:
        shards = self.mailbox.peers.ready("detokenizer")
        for sequence in self.sequences.values():
            if sequence.shard == peer.source and sequence.state != "ended" and shards:
                self.open_text(sequence, f"detokenizer.{shards[0]}")

    def on_peer(self, peer: Peer) -> None:
        """A shard that comes back must not go on with what another has now."""
        for sequence in self.sequences.values():
            if peer.source in sequence.left and sequence.state != "ended":
                self.mailbox.send(peer.source, Close(seq=sequence.seq, final=0, reason="moved"))

    # ---- requests -------------------------------------------------------------------------------

    def _on_Tokenized(self, source: str, request: Tokenized) -> None:
        tenant, name, attempt = request.tenant, request.request, request.attempt
        if (tenant, name) in self.tombstones:
            why = "cancelled before it arrived"
            self.mailbox.send(
                source, Rejected(tenant=tenant, request=name, attempt=attempt, code=499, message=why)
            )
            return
        self.mailbox.send(source, Accepted(tenant=tenant, request=name, attempt=attempt))
        shard = f"detokenizer.{self.mailbox.peers.ready('detokenizer')[0]}"
        for choice in range(request.n):
            sequence = FakeSequence(
                seq=next(self._ids), choice=choice, request=request, tokens=list(request.tokens)
            )
            self.sequences[sequence.seq] = sequence
            self.open_text(sequence, shard)
            self.steps.open_slot(sequence)
        self.steps.plan()

    def open_text(self, sequence: FakeSequence, shard: str) -> None:
        request = sequence.request
        sequence.left, sequence.shard = {*sequence.left, sequence.shard}, shard
        self.mailbox.send(
            shard,
            Open(
                seq=sequence.seq,
                request=request.request,
                attempt=request.attempt,
                tenant=request.tenant,
                model=request.model,
                inbox=request.inbox,
                choice=sequence.choice,
                choices=request.n,
                stop=request.stop,
                tokens=ints(sequence.generated),
            ),
        )

    def cancel(self, tenant: str, request: str) -> None:
        mine = self.sequences.values()
        found = [s for s in mine if (s.request.tenant, s.request.request) == (tenant, request)]
        if not found:
            self.tombstones.add((tenant, request))
        for sequence in found:
            self.close(sequence, len(sequence.generated), "error", 499)

    def _on_StopFound(self, source: str, found: StopFound) -> None:
        sequence = self.sequences[found.seq]
        if sequence.state in ("closed", "ended"):
            sequence.final = min(sequence.final, found.index)
        else:
            self.close(sequence, found.index, "stop")

    def close(self, sequence: FakeSequence, final: int, reason: str, code: int = 0) -> None:
        if sequence.state not in ("closed", "ended"):
            sequence.state, sequence.final = "closed", final
            self.steps.free_slot(sequence)
            self.mailbox.send(sequence.shard, Close(seq=sequence.seq, final=final, reason=reason, code=code))

    def _on_Ended(self, source: str, ended: Ended) -> None:
        sequence = self.sequences[ended.seq]
        sequence.state, sequence.final, sequence.reason = "ended", ended.index, ended.reason
        sequence.usage = Usage(prompt_tokens=len(sequence.request.tokens), completion_tokens=ended.index)


def cancel_of(delivery: Delivery) -> tuple[str, str]:
    """(tenant, request) of a delivery on a public cancel subject."""
    return subjects.name_at(delivery.subject, 3), subjects.name_at(delivery.subject, 4)
