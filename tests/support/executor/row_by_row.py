"""Deterministic mode, as engines are held to it: a row's logits are the same bits at any batch size, in any
company, and however the tokens before it were cut into chunks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import torch
from support.executor.plan_maker import PlanMaker, Row


def logits(maker: PlanMaker, rows: list[Row]) -> torch.Tensor:
    plan = maker.plan(rows)
    pending = maker.backend.forward(plan)
    maker.backend.sample(pending)
    return pending.logits.cpu()  # the output of the forward pass, before any choice


def assert_rows_do_not_see_each_other(
    maker: PlanMaker, batches: Sequence[int], least: int, spread: int
) -> None:
    draw = random.Random(5)
    lengths = {slot: least + 7 * slot % spread for slot in range(max(batches))}
    vocab = maker.backend.info.vocab
    for slot, length in lengths.items():
        maker.open(slot, [draw.randrange(vocab) for _ in range(length + 1)], logprobs=1)
    alone = {
        slot: logits(maker, [Row(slot, 0, length, feeds=(slot,))])[0] for slot, length in lengths.items()
    }
    for batch in (5, max(batches)):
        together = logits(
            maker, [Row(slot, 0, length, feeds=(slot,)) for slot, length in list(lengths.items())[:batch]]
        )
        for slot, row in enumerate(together):
            assert torch.equal(row, alone[slot])

    decoded: dict[int, torch.Tensor] = {}
    for batch in batches:
        for slots in (list(range(batch)), draw.sample(sorted(lengths), batch)):
            rows = [Row(slot, lengths[slot], 1, feeds=(slot,)) for slot in slots]
            for slot, row in zip(slots, logits(maker, rows), strict=True):
                assert torch.equal(row, decoded.setdefault(slot, row)), (batch, slot)

    mixed = [
        Row(3, lengths[3], 1, feeds=(3,)),
        Row(0, 0, lengths[0], feeds=(0,)),
        Row(9, lengths[9], 1, feeds=(9,)),
    ]
    for found, wanted in zip(logits(maker, mixed), (decoded[3], alone[0], decoded[9]), strict=True):
        assert torch.equal(found, wanted)


def assert_chunks_do_not_show(maker: PlanMaker, length: int) -> None:
    tokens = random.Random(6).choices(range(maker.backend.info.vocab), k=length + 1)
    maker.open(0, tokens, logprobs=1)
    whole = logits(maker, [Row(0, 0, length, feeds=(0,))])[0]
    for slot, cuts in enumerate(([1], [2], [length - 1], [7, 8, 9], [5, 16], list(range(1, length))), 1):
        maker.open(slot, tokens, logprobs=1)
        for start, end in itertools.pairwise((0, *cuts, length)):
            found = logits(maker, [Row(slot, start, end - start, feeds=(slot,))])
        assert torch.equal(found[0], whole), cuts
