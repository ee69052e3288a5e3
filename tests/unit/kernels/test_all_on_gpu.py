"""The GPU's kernels against the torch references: the same functions, other code. On a GPU where there is one
(scripts/sanitize runs them so), else in Triton's interpreter.

The interpreter knows float32 and float16 only, and takes milliseconds for each program: small shapes with odd
ends. What it cannot show (bf16, speed) is measured on a GPU by loadtest.gpu, whose results lie beside.
"""

from __future__ import annotations

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
from support.executor.references import write_rows

from kernels.attention import ref as attention
from kernels.attention.decode import DecodeRows, Tuning, attend_decode, decode_work, plan_decode
from kernels.attention.prefill import PrefillTiles, PrefillTuning, attend_prefill, tile_queries
from kernels.attention.ref import write_kv
from kernels.elementwise import ref as norm_ref
from kernels.elementwise import ref as swiglu_ref
from kernels.elementwise.gpu import (
    FROM_DEVICE,
    HeadNorms,
    Resolved,
    RopeInputs,
    SlotState,
    add_rms_norm_,
    resolve,
    rms_norm,
    rope_write,
    scatter,
    swiglu,
)
from kernels.elementwise.ref import apply_rope, rope_table
from kernels.gemm.gpu import MatmulTuning, matmul
from kernels.sampling import ref as sampler
from kernels.sampling.gpu import Choices, choose, mask_room, scratch

CLOSE = 1e-5


def test_norms_add_parts_and_leave_the_sum() -> None:
    x, residual, weight = normal(3, 72), normal(3, 72, seed=1), normal(72, seed=2)
    wanted, total = norm_ref.add_rms_norm(x, residual, weight, 1e-5)
    for given in (x, torch.stack((x * 0.25, x * 0.75))):
        kept = residual.clone()
        assert far(add_rms_norm_(given, kept, weight, 1e-5), wanted) < CLOSE
        assert far(kept, total) < CLOSE
    assert far(rms_norm(x, weight, 1e-5), norm_ref.rms_norm(x, weight, 1e-5)) < CLOSE


def test_swiglu_of_a_width_that_no_tile_divides() -> None:
    gate_up = normal(2, 2 * 1100)
    wanted = swiglu_ref.swiglu(gate_up)
    assert far(swiglu(gate_up), wanted) < CLOSE
    assert far(swiglu(torch.stack((gate_up * 0.25, gate_up * 0.75)), torch.float32), wanted) < CLOSE


@pytest.mark.parametrize("splits", [1, 2])
def test_a_product_is_the_sum_of_its_splits(splits: int) -> None:
    x, weight = normal(3, 128), normal(64, 128, seed=1)
    found = matmul(x, weight, MatmulTuning(32, 32, splits))
    assert far(found if splits == 1 else found.sum(0), x.double() @ weight.double().T) < CLOSE


def test_a_gated_product_is_its_swiglu() -> None:
    x, weight = normal(3, 128), normal(64, 128, seed=1)
    found = matmul(x, weight, MatmulTuning(32, 32, gated=True))
    assert far(found, swiglu_ref.swiglu(x @ weight.T)) < CLOSE
    with pytest.raises(ValueError, match="does not divide"):
        matmul(x, weight, MatmulTuning(32, 32, 2, gated=True))


@pytest.mark.parametrize("normed", [False, True])
def test_rotation_writes_where_the_references_do(normed: bool) -> None:
    kv = normal(BLOCKS, LAYERS, 2, BLOCK, KV_HEADS, DIM)
    wanted = kv.clone()
    tokens = 3
    qkv = normal(tokens, (HEADS + 2 * KV_HEADS) * DIM, seed=1)
    table = rope_table(torch.rand(DIM // 2, dtype=torch.float64), 64).to(DEVICE)
    positions, blocks = words(3, 17, 40), torch.tensor([4, 7, 9], device=DEVICE)
    query, key, value = torch.split(qkv.view(tokens, -1, DIM), [HEADS, KV_HEADS, KV_HEADS], 1)
    norms = HeadNorms(None, None, 1e-5)
    if normed:
        norms = HeadNorms(normal(DIM, seed=2), normal(DIM, seed=3), 1e-5)
        query, key = norm_ref.rms_norm(query, norms.query, 1e-5), norm_ref.rms_norm(key, norms.key, 1e-5)
    rotation = table[positions.long()]
    rotated = apply_rope(key, rotation)
    write_kv(wanted, write_rows(wanted, blocks, positions.long() % BLOCK)[1], rotated, value)
    places = (blocks * BLOCK + positions % BLOCK).int()
    found = rope_write(qkv, RopeInputs(table, positions, places), norms, kv, 1, HEADS)
    assert far(found, apply_rope(query, rotation)) < CLOSE
    assert far(kv, wanted) < CLOSE
    assert far(qkv.view(tokens, -1, DIM)[:, HEADS : HEADS + KV_HEADS], rotated) < CLOSE


@pytest.mark.parametrize("processors", [1, 9])
def test_decode_rows_of_any_length_however_they_are_divided(processors: int) -> None:
    """One worker for all, and more than there are rows: a row is then merged from several."""
    lengths, kv = [1, 0, 77, 20], normal(BLOCKS, LAYERS, 2, BLOCK, KV_HEADS, DIM)
    slots, tables = words(2, 0, 1, 3), shuffled(4)
    query = normal(len(lengths), HEADS, DIM, seed=2)
    work = decode_work(kv, HEADS, 8, processors, Tuning(tile_tokens=16, per_sm=1))
    out, at = torch.full_like(query, torch.nan), words(*lengths)
    rows = DecodeRows(slots, at, tables)
    plan_decode(work, rows)
    attend_decode(query, kv, 1, rows, work, out)
    for row, length in enumerate(lengths):
        if not length:
            assert out[row].isnan().all()
            continue
        table = tables[slots[row], : -(-length // BLOCK)].long()[None]
        mask = torch.zeros(1, 1, 1, length, dtype=torch.float64, device=DEVICE)
        wanted = attention.attend_decode(query[row : row + 1].double(), kv.double(), 1, table, mask)
        assert far(out[row], wanted[0]) < CLOSE


def test_chunks_with_and_without_a_prefix_in_one_launch() -> None:
    kv, tuning = normal(BLOCKS, LAYERS, 2, BLOCK, KV_HEADS, DIM), PrefillTuning(32, 16, 1, 4)
    tables = shuffled(4)
    chunks, size = ((0, 0, 13), (2, 30, 12)), tile_queries(HEADS, KV_HEADS, tuning)  # slot, start, count
    columns: list[list[int]] = [[], [], [], []]
    first = 0
    for slot, start, count in chunks:
        for at in range(0, count, size):
            tile = (slot, first + at, start + at, min(size, count - at))
            for column, value in zip(columns, tile, strict=True):
                column.append(value)
        first += count
    for column in columns:
        column.append(0)  # no tile
    query = normal(first, HEADS, DIM, seed=2)
    out = torch.full_like(query, torch.nan)
    tiles = PrefillTiles(*(words(*column) for column in columns), tables)
    attend_prefill(query, kv, 1, tiles, tuning, out)
    first = 0
    for slot, start, count in chunks:
        end = start + count
        later = torch.arange(end)[None] > torch.arange(start, end)[:, None]
        mask = torch.zeros(count, end, dtype=torch.float64).masked_fill_(later, -torch.inf).to(DEVICE)
        rows = slice(first, first + count)
        table = tables[slot, : -(-end // BLOCK)].long()
        wanted = attention.attend_prefill(query[rows].double(), kv.double(), 1, table, mask)
        assert far(out[rows], wanted) < CLOSE
        first += count


def test_inputs_are_resolved_from_the_slots() -> None:
    state = SlotState(torch.arange(40).view(4, 10).int().to(DEVICE), words(5, 6, 7, 0), words(0, 1, 0, 1))
    columns = words(0, 1, 2, 2, 3, 9, 17, 3, 4, 0, FROM_DEVICE, FROM_DEVICE, FROM_DEVICE, 44, 0, 3)
    found = Resolved(words(*[-9] * 5), words(*[-9] * 5), words(*[-9] * 4))
    resolve(columns, state, 99, BLOCK, found)
    assert found.ids.tolist() == [5, 6, 7, 44, 0]
    # The second and the last slot are done: their KV goes to block 99, and they attend to nothing.
    assert found.slot_mapping.tolist() == [1 * 8 + 1, 99 * 8 + 1, 20 * 8 + 3, 20 * 8 + 4, 99 * 8]
    assert found.lengths.tolist() == [10, 0, 4, 0]
    target = torch.zeros(2, 5, dtype=torch.int32, device=DEVICE)
    scatter(words(1, 7), words(3, 4), target)
    assert target.tolist() == [[0, 3, 0, 0, 0], [0, 0, 4, 0, 0]]


def test_chosen_tokens_equal_the_references_and_end_their_slots() -> None:
    filters = [
        (0, 0, 1, 0), (1, 0, 1, 0), (0.7, 5, 1, 0), (1, 40, 0.9, 0.01), (1.3, 0, 0.8, 0), (1, 0, 1, 0.1),
        (1, 300, 0.99, 0),
    ]  # fmt: skip
    rows, vocab = len(filters), 1000
    logits = normal(rows, vocab) * 3
    seeds = torch.randint(-(2**62), 2**62, (rows + 1,), generator=torch.Generator().manual_seed(4)).to(DEVICE)
    positions = words(*range(10, 10 + rows))
    table = slot_table([*filters, (0, 0, 0, 0)], DEVICE)
    wanted = []
    for row, (temperature, top_k, top_p, min_p) in enumerate(filters):
        if not temperature:
            wanted.append(int(logits[row].argmax()))
            continue
        scaled = ((logits[row] - logits[row].max()) / temperature)[None]
        asked = [torch.tensor([value], device=DEVICE) for value in (top_k, float(top_p), float(min_p))]
        if top_k or top_p < 1 or min_p:
            scaled = sampler.keep_likely(scaled, *asked)
        wanted.append(int(sampler.draw(scaled, seeds[row : row + 1], positions[row : row + 1].long())))
    stops = torch.full((rows + 1, 2), -1, dtype=torch.int32, device=DEVICE)
    stops[1, 1] = wanted[1]
    limits, done = words(*[1000] * rows, 0), words(*[0] * rows, 1)
    limits[2], done[3] = 13, 1  # the third slot is at its length, the fourth had ended before
    last = words(*range(rows + 1))
    chosen = torch.full((2, rows), -9, dtype=torch.int32, device=DEVICE)
    masks = words(*[0] * (rows + 1)), mask_room(rows, vocab, logits.device)
    choices = Choices(table, seeds, limits, stops, last, done, *masks)
    choose(logits, words(*range(rows)), positions, choices, scratch(rows, vocab, logits.device), chosen)
    assert chosen[0].tolist() == [*wanted[:3], -1, *wanted[4:]]
    assert chosen[1].tolist() == [0, 1, 1, 2, 0, 0, 0]
    assert last.tolist() == [*wanted[:3], 3, *wanted[4:], rows]
    assert done.tolist() == [0, 1, 1, 1, 0, 0, 0, 1]
