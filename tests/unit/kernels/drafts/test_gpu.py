"""The kernels of drafts beside the reference, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import random

import pytest
import torch
from support.executor.draws import slot_table
from support.executor.gpu_side import (
    BLOCK,
    BLOCKS,
    DEVICE,
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    far,
    normal,
    shuffled,
    words,
)

from kernels.attention import ref as attention
from kernels.attention.decode import DecodeRows, Tuning, attend_decode, decode_work, plan_decode
from kernels.drafts import accept as accept_ref
from kernels.drafts import propose as propose_ref
from kernels.drafts.gpu import COLUMNS, accept, propose
from kernels.elementwise.gpu import (
    AT_PLACE,
    FROM_DEVICE,
    NO_DRAFT,
    DraftState,
    Resolved,
    SlotState,
    place_tiles,
    resolve,
)
from kernels.sampling import INVALID
from kernels.sampling.gpu import Choices, choose, mask_room, scratch

WIDTH, VOCAB = 2200, 200


def state_of(slots: int, width: int = WIDTH) -> DraftState:
    """The state of slots without tokens; the last one is spare."""
    history = torch.full((slots + 1, width), -7, dtype=torch.int32, device=DEVICE)
    ids = torch.full((slots + 1, 8), -7, dtype=torch.int32, device=DEVICE)
    zeros, limits = (words(*[value] * (slots + 1)) for value in (0, 90))
    return DraftState(zeros, ids, limits, zeros.clone(), zeros.clone(), history)


def test_kernel_proposes_the_drafts_of_the_reference() -> None:
    """Texts have lengths around that which a program reads at a time; a slot that is done has no draft."""
    chance, state = random.Random(2), state_of(9)
    texts = [chance.choices(range(letters), k=length) for letters in (2, 6) for length in (1, 4, 300, 2049)]
    for slot, text in enumerate([*texts, [1, 1, 1, 1]]):
        state.history[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
        state.places[slot] = len(text) - 1
    done, slots = words(*[0] * 8, 1, 1), [3, 0, 8, 7, 1, 2, 6, 5, 4, 9]
    rows = torch.tensor(slots).repeat_interleave(4).int().to(DEVICE)
    propose(rows, 4, done, state)
    for slot, text in enumerate(texts):
        assert state.ids[slot].tolist() == propose_ref(torch.tensor(text), 8).tolist()
    assert state.ids[8:].tolist() == [[-1] * 8] * 2


def test_kernel_finds_drafts_in_the_prediction_as_the_reference_does() -> None:
    chance, state = random.Random(4), state_of(40, 60)
    wanted = []
    for slot in range(40):
        letters, length, prompt = chance.choice((2, 3, 5)), chance.randrange(2, 24), chance.randrange(1, 12)
        text = chance.choices(range(letters), k=length)
        prediction = chance.choices(range(letters), k=chance.randrange(14))
        prompt = min(prompt, length - 1)
        state.history[slot, :length] = torch.tensor(text, dtype=torch.int32)
        state.history[slot, 60 - len(prediction) :] = torch.tensor(prediction, dtype=torch.int32)
        state.places[slot], state.prompts[slot], state.predicted[slot] = length - 1, prompt, len(prediction)
        given = torch.tensor(text), 8, torch.tensor(prediction), prompt
        wanted.append(propose_ref(*given).tolist())
    propose(words(*range(40)), 1, words(*[0] * 41), state)
    assert state.ids[:40].tolist() == wanted
    assert any(-1 in drafts[1:] and drafts[0] >= 0 for drafts in wanted)  # a prediction ends


@pytest.mark.parametrize("processors", [1, 9])
@pytest.mark.parametrize("queries", [2, 4, 8])
def test_the_tokens_of_a_row_see_one_more_each(processors: int, queries: int) -> None:
    """However the work is divided, also where the parts of a row end between its tokens' ends. What lies
    after the last token may be NaN."""
    lengths, drafts = [1, 0, 77, 15, 31], [queries - 1, 2, 0, 1, queries - 1]
    kv, slots, tables = normal(BLOCKS, LAYERS, 2, BLOCK, KV_HEADS, DIM), [2, 0, 1, 3, 4], shuffled(4)
    tables = torch.cat((tables, tables[:1]))
    ids = torch.full((len(lengths), queries), NO_DRAFT, dtype=torch.int32, device=DEVICE)
    for row, (length, count) in enumerate(zip(lengths, drafts, strict=True)):
        ids[row, 0], ids[row, 1 : 1 + count] = FROM_DEVICE, 5
        if length and row < 4:  # the last one has the table of the empty one
            for at in range(length + count, 80):
                kv[tables[slots[row], at // BLOCK], 1, :, at % BLOCK] = torch.nan
    query = normal(len(lengths) * queries, HEADS, DIM, seed=2)
    work = decode_work(kv, HEADS, 8, processors, Tuning(tile_tokens=16, per_sm=1), queries=8)
    named = torch.tensor(slots).repeat_interleave(queries).int().to(DEVICE)
    rows = DecodeRows(named, words(*lengths), tables, queries, ids.view(-1))
    out = torch.full_like(query, torch.nan)
    plan_decode(work, rows)
    attend_decode(query, kv, 1, rows, work, out)
    for row, (length, count) in enumerate(zip(lengths, drafts, strict=True)):
        for i in range(1 + count if length else 0):
            table = tables[slots[row], : -(-(length + i) // BLOCK)].long()[None]
            mask = torch.zeros(1, 1, 1, length + i, dtype=torch.float64, device=DEVICE)
            at = row * queries + i
            wanted = attention.attend_decode(query[at : at + 1].double(), kv.double(), 1, table, mask)
            assert far(out[at], wanted[0]) < 1e-5


def test_inputs_of_drafts_are_resolved_at_the_place_of_their_slot() -> None:
    """Slot 0 has two drafts of three, slot 1 is near its largest length, slot 2 lacks a block, slot 3 is
    done, slot 4 is fed by the host's place, slot 5 wants one draft."""
    spare, drafts = 99, state_of(6, 40)
    drafts.places[:6] = words(6, 17, 7, 5, 9, 3)
    drafts.ids[:6, :3] = words(11, 12, -1, 21, 22, 23, 31, 32, 33, 41, 42, 43, 51, 52, 53, 61, 62, 63).view(
        6, 3
    )
    drafts.max_lengths[1] = 20
    tables = torch.arange(42).view(7, 6).int().to(DEVICE)
    tables[2, 1] = spare
    state = SlotState(tables, words(1, 2, 3, 4, 5, 6, 0), words(0, 0, 0, 1, 0, 0, 1), drafts)
    rows, queries = 6, 4
    slots = [slot for slot in range(rows) for _ in range(queries)]
    ids = [FROM_DEVICE, FROM_DEVICE - 1, FROM_DEVICE - 2, FROM_DEVICE - 3] * rows
    ids[4 * 4 + 1 : 5 * 4] = [NO_DRAFT] * 3
    ids[5 * 4 + 2 : 6 * 4] = [NO_DRAFT] * 2
    positions = [AT_PLACE] * 16 + [9] * 4 + [AT_PLACE] * 4
    columns = words(*slots, *positions, *ids, rows)
    found = Resolved(*(words(*[-9] * n) for n in (24, 24, rows)))
    resolve(columns, state, spare, BLOCK, found, queries)
    none = NO_DRAFT
    assert columns[48:72].view(rows, queries).tolist() == [
        [-1, 11, 12, none], [-1, 21, none, none], [-1, none, none, none], [-1, none, none, none],
        [-1, none, none, none], [-1, 61, none, none],
    ]  # fmt: skip
    assert columns[24:48].view(rows, queries).tolist() == [
        [6, 7, 8, 6], [17, 18, 17, 17], [7] * 4, [5] * 4, [9] * 4, [3, 4, 3, 3],
    ]  # fmt: skip
    assert found.ids.view(rows, queries).tolist() == [  # a missing draft has the slot's last token as its id
        [1, 11, 12, 1], [2, 21, 2, 2], [3] * 4, [4] * 4, [5] * 4, [6, 61, 6, 6],
    ]  # fmt: skip
    assert found.lengths.tolist() == [7, 18, 8, 0, 10, 4]
    lost = spare * BLOCK
    at = found.slot_mapping.view(rows, queries).tolist()
    assert at[0] == [6, 7, 8 + 0, lost + 6]
    assert at[1] == [8 * 8 + 1, 8 * 8 + 2, lost + 1, lost + 1]
    assert at[2][0] == 12 * 8 + 7
    assert all(place >= lost for place in (*at[2][1:], *at[3], *at[4][1:], *at[5][2:]))
    starts, counts = words(AT_PLACE, AT_PLACE + 2, 7, AT_PLACE), words(2, 2, 9, 0)
    tiles = words(0, 0, 3, 6), words(0, 2, 12, 0), starts, counts
    place_tiles(tiles, columns[48:72], drafts.places, queries)
    assert (starts.tolist(), counts.tolist()) == ([6, 8, 7, 0], [2, 1, 9, 0])


@pytest.mark.parametrize("queries", [2, 4, 8])
def test_chosen_tokens_are_accepted_as_the_reference_accepts_them(queries: int) -> None:
    rows = 7  # of slots 0 to 5 and of the spare one
    slots = [3, 0, 5, 1, 4, 2, 6]
    drafts, generator = state_of(6, 60), torch.Generator().manual_seed(3)
    drafts.places[:6] = words(10, 20, 30, 40, 50, 12)
    places = drafts.places.tolist()
    logits = torch.randn(rows * queries, VOCAB, generator=generator).to(DEVICE) * 3
    stops = torch.full((7, 2), -1, dtype=torch.int32, device=DEVICE)
    done, last = words(0, 0, 0, 0, 1, 0, 1), words(*[77] * 7)
    choices = Choices(
        slot_table([(1.0, 5, 1, 0), (0, 0, 1, 0)] * 3 + [(0, 0, 0, 0)], DEVICE),
        torch.arange(7, device=DEVICE) * 991, drafts.max_lengths, stops, last, done, words(*[0] * 7),
        mask_room(6, VOCAB, logits.device), drafts.places, drafts.history,
    )  # fmt: skip
    token_rows = torch.randperm(rows, generator=generator)[:, None] * queries + torch.arange(queries)
    token_rows = token_rows.view(-1).int().to(DEVICE)
    named = torch.tensor(slots).repeat_interleave(queries).int().to(DEVICE)
    at = -1 - torch.arange(queries).repeat(rows).int().to(DEVICE)
    tried = torch.full((2, rows * queries), -9, dtype=torch.int32, device=DEVICE)
    room = scratch(rows * queries, VOCAB, logits.device)
    one_by_one = torch.full((2, rows * queries), -9, dtype=torch.int32, device=DEVICE)
    for q in range(queries):  # as many steps of one token: the same draws
        mine = slice(q, None, queries)
        where = torch.tensor([places[slot] + 1 + q for slot in slots]).int().to(DEVICE)
        found = torch.full((2, rows), -9, dtype=torch.int32, device=DEVICE)
        before = [each.clone() for each in (last, done, drafts.places)]
        choose(logits[mine].contiguous(), named[mine].contiguous(), where, choices, room, found)
        one_by_one[:, mine] = found
        for each, kept in zip((last, done, drafts.places), before, strict=True):
            each.copy_(kept)
    drafts.history.fill_(-7)
    choose(logits.clone(), named, at, choices, room, tried, verifies=True)
    assert last.tolist() == [77] * 7  # slots stay as they are
    alive = torch.tensor([slot not in (4, 6) for slot in slots]).repeat_interleave(queries)
    assert tried[:, alive].tolist() == one_by_one[:, alive].tolist()

    by_row = tried[0].view(rows, queries)
    given = torch.full((rows, queries), NO_DRAFT, dtype=torch.int32, device=DEVICE)
    given[:, 0] = FROM_DEVICE
    for row in range(rows):  # row 0 keeps all, row 1 has a wrong draft, row 2 has none
        count = (queries - 1, queries - 1, 0, 1)[row % 4]
        given[row, 1 : 1 + count] = by_row[row, :count]
        if row == 1:
            given[row, count] = VOCAB
    tried[1, 3 * queries] = 1  # the fourth row ends with its first token
    tried[:, queries - 1] = torch.tensor([-1, INVALID])  # the last token of the first row has a flaw
    ids = torch.full((rows * queries,), -3, dtype=torch.int32, device=DEVICE)
    ids[token_rows.long()] = given.view(-1)
    answer = torch.full((queries + COLUMNS, rows), -9, dtype=torch.int32, device=DEVICE)
    accept((token_rows, named), tried, ids, choices, answer)
    wanted = accept_ref(by_row, tried[1].view(rows, queries), given[:, 1:]).tolist()
    for row, slot in enumerate(slots):
        column, count = answer[:, row].tolist(), wanted[row]
        if slot in (4, 6):
            assert column == [-1] * queries + [1, 2, 0]
            continue
        kept = by_row[row, :count].tolist()
        assert column[:queries] == [*kept, *[-1] * (queries - count)]
        assert column[queries:] == [count, int(row == 3), (given[row, 1:] >= 0).sum().item()]
        assert (last[slot].item(), done[slot].item()) == (kept[-1], int(row == 3))
        assert drafts.places[slot].item() == places[slot] + count
        assert drafts.history[slot, places[slot] + 1 :][: count + 1].tolist() == [*kept, -7]
