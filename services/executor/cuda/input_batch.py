"""Turns the columns of a plan into the words that a graph reads: one pinned buffer, one copy.

    plan ─▶ TilePlanner: tiles, layout ─▶ InputStaging: pinned words ─▶ words on the device ─▶ ForwardStep

graph_runner.py calls it. The words:

    sample rows, slots, positions [3 * slots] | token slots, positions, ids [3 * tokens], decode rows |
    tiles: slots, rows, starts, counts, and if tiles may be split part, parts, merges [4 or 7 * tiles] |
    device-state updates: indices, values

Decode rows come first, then the chunks; the rest of a bucket is padding on the spare slot. In a step with
drafts a row has a token for each, of which only the device has the id and the position.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.cuda import Event

from kernels.attention.decode import DecodeRows
from kernels.attention.prefill import PrefillSplit, PrefillTiles, PrefillTuning, parts_room, tile_queries
from kernels.drafts.gpu import propose
from kernels.elementwise.gpu import (
    AT_PLACE,
    FROM_DEVICE,
    NO_DRAFT,
    DraftState,
    Resolved,
    SlotState,
    move,
    place_tiles,
    resolve,
    scatter,
)
from kernels.sampling.gpu import Choices, mask_room
from kernels.sampling.ref import PARAMETERS
from services.executor.checkpoint.loader import Loaded
from services.executor.cuda.kernel_configs import DeviceTuning
from services.executor.cuda.optioned import ForwardStep
from services.executor.parallel.step_split import Chunk
from services.executor.sampling.sampler import NO_TOKEN, STOP_IDS, SlotTokens, seed_key, slot_row
from shared.errors import EngineError
from shared.messages import AT_DEVICE, FROM_HOST, Ints, SlotOpen, StepPlan

Words = NDArray[np.int32]

TILE_COLUMNS, SPLIT_COLUMNS = 4, 7  # slots, rows, starts, counts; and part, parts, merges
DENSE_TOKENS = 1024  # from here on cuDNN, which reads no block table, attends a prompt's first chunk
DENSE_STEP = 512  # cuDNN attends multiples of this: it plans each length once, which takes 80 ms
RING = 8  # steps with inputs or answers in pinned memory at once: more than are ever in flight
LONG_TOKENS = 4096
DRAFTS = (1, 3, 7)  # of each row of a step: its graphs; a row has a power of two of tokens
MAX_DRAFT_ROWS = 64  # in a step with drafts
MOST_PREDICTED = 4096  # tokens of a prediction that there is always room for; 4 MiB of 256 slots
_CHUNKS = 32  # in a mixed graph besides decodes: each may end in a tile that is not full

# In units of a program's time for one tile of KV, as measured on an H200 (docs/benchmarks/gpu.md):
_START = 1  # a program's fixed time
_MERGE = 2  # the fixed time of a merge
_PARTS = 10  # to write and read the parts of as many programs as the device runs at once
_ROUNDS = 2  # rounds of such programs in a step with parts, at most: the memory for parts is bounded


@dataclass(frozen=True, slots=True)
class ArrangedStep:
    """A plan with its rows in token order."""

    tokens: int
    decode_rows: int
    columns: Words  # [3, tokens]: slots, positions, ids
    chunks: tuple[Chunk, ...]
    samples: Words  # [3, samples]: token rows, slots, positions of the new tokens
    queries: int = 1  # tokens of each row; over 1: the last token and drafts


NO_TILES: Words = np.zeros((4, 0), dtype=np.int32)
UNSET: tuple[Words, Words] = (np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int32))
IDLE = ArrangedStep(0, 0, np.zeros((3, 0), dtype=np.int32), (), np.zeros((3, 0), dtype=np.int32))


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets in the buffer, in words. `tiles` 0: a decode step; `split`: tiles may be split; `queries`: see
    ArrangedStep."""

    samples: int
    tokens: int
    tiles: int
    split: bool = False
    queries: int = 1

    @property
    def token_at(self) -> int:
        return 3 * self.samples

    @property
    def tile_at(self) -> int:
        return self.token_at + -(-(3 * self.tokens + 1) // 4) * 4

    @property
    def tile_columns(self) -> int:
        return SPLIT_COLUMNS if self.split else TILE_COLUMNS

    @property
    def words(self) -> int:
        return self.tile_at + self.tile_columns * self.tiles


def arrange(plan: StepPlan, slots: CudaSlots, *, apart: bool = True) -> ArrangedStep:
    """Put a plan's rows in token order, decode rows first; if not `apart`, decode rows are chunks of one
    token. A row at the device's place has no drafts. Raises EngineError for a slot that is not open or tokens
    that are not recorded."""
    rows, starts, counts = _numbers(plan.slots), _numbers(plan.starts), _numbers(plan.counts)
    fed = _numbers(plan.from_device)
    placed = fed == AT_DEVICE
    starts[placed], counts[placed] = AT_PLACE, 1
    alone = (counts == 1) & apart
    decode = np.flatnonzero(alone)
    order = np.concatenate((decode, np.flatnonzero(~alone))) if len(decode) < len(counts) else decode
    first = np.empty_like(counts)
    first[order] = np.cumsum(counts[order]) - counts[order]
    tokens = int(counts.sum())
    columns = np.empty((3, tokens), dtype=np.int32)
    columns[0], columns[1], columns[2] = np.repeat(rows[order], counts[order]), 0, FROM_DEVICE
    by_device = np.flatnonzero(fed)
    columns[1, first[by_device]] = starts[by_device]
    for i in np.flatnonzero(fed == 0).tolist():
        start, count, at = int(starts[i]), int(counts[i]), int(first[i])
        known = slots.tokens(int(rows[i]))
        if start + count > len(known):
            raise EngineError(
                f"slot {rows[i]} has {len(known)} tokens; the plan wants {start} to {start + count}"
            )
        columns[1, at : at + count] = np.arange(start, start + count)
        columns[2, at : at + count] = known[start : start + count]
    chunks = tuple(
        Chunk(int(rows[i]), int(first[i]), int(starts[i]), int(counts[i]))
        for i in order[len(decode) :].tolist()
    )
    sampled = _numbers(plan.sample_rows)
    ends = np.where(placed, -1, starts + counts)
    samples = np.stack((first[sampled] + counts[sampled] - 1, _numbers(plan.sample_slots), ends[sampled]))
    return ArrangedStep(tokens, len(decode), columns, chunks, samples)


def can_have_drafts(plan: StepPlan) -> bool:
    """Whether a step may have drafts: its rows are decodes, each sampled for its own slot, and some row asks
    for drafts."""
    if AT_DEVICE not in plan.from_device or FROM_HOST in plan.from_device:
        return False
    if len(plan.slots) > MAX_DRAFT_ROWS or max(plan.counts) == 1:
        return False
    own = sorted(zip(plan.sample_rows, plan.sample_slots, strict=True))
    return own == list(enumerate(plan.slots))


def arrange_drafts(plan: StepPlan, count: int, *, apart: bool = True) -> ArrangedStep:
    """The step of a plan that can have drafts: each row has its last token and `count` places for drafts, of
    which it uses those that the plan asks for; if not `apart`, rows are chunks."""
    rows, queries = len(plan.slots), 1 + count
    slots, wanted = np.repeat(_numbers(plan.slots), queries), np.repeat(_numbers(plan.counts), queries)
    placed = np.repeat(_numbers(plan.from_device), queries) == AT_DEVICE
    starts, ahead = np.repeat(_numbers(plan.starts), queries), np.tile(np.arange(queries), rows)
    ids = np.where(ahead < np.where(placed, wanted, 1), FROM_DEVICE - ahead, NO_DRAFT)
    columns = np.stack((slots, np.where(placed, AT_PLACE, starts), ids)).astype(np.int32)
    chunks = () if apart else tuple(
        Chunk(slot, row * queries, AT_PLACE, queries) for row, slot in enumerate(plan.slots)
    )  # fmt: skip
    tokens = (_numbers(plan.sample_rows)[:, None] * queries + np.arange(queries)).reshape(-1)
    positions = np.where(placed, -1 - ahead, starts + 1 + ahead)[tokens]
    samples = np.stack((tokens, slots[tokens], positions))
    return ArrangedStep(rows * queries, rows if apart else 0, columns, chunks, samples, queries)


def _numbers(column: Ints) -> NDArray[np.int64]:
    return np.array(column, dtype=np.int64)


def samples_of(first: ArrangedStep, second: ArrangedStep, offset: int, order: Sequence[int]) -> Words:
    """The samples of a step's two micro-batches in the `order` of step_split.MicroBatches; the second one's
    token rows start at `offset`."""
    moved = second.samples + np.array([[offset], [0], [0]], dtype=np.int32)
    return np.concatenate((first.samples, moved), 1)[:, list(order)]


def split_dense(chunks: tuple[Chunk, ...]) -> tuple[tuple[Chunk, ...], tuple[Chunk, ...]]:
    """The chunks for cuDNN (long ones that start their sequence, without their last tokens), and the rest."""
    dense, tiled = [], []
    for chunk in chunks:
        count = 0 if chunk.start or chunk.count < DENSE_TOKENS else chunk.count // DENSE_STEP * DENSE_STEP
        if count:
            dense.append(Chunk(chunk.slot, chunk.first, 0, count))
        if count < chunk.count:
            tiled.append(Chunk(chunk.slot, chunk.first + count, chunk.start + count, chunk.count - count))
    return tuple(dense), tuple(tiled)


def tiles_of(chunks: tuple[Chunk, ...], size: int) -> Words:
    """`[4, tiles]`: slot, token row, position and count of tiles of up to `size` tokens."""
    found = [
        (chunk.slot, chunk.first + at, chunk.start + at, min(size, chunk.count - at))
        for chunk in chunks
        for at in range(0, chunk.count, size)
    ]
    found.sort(key=lambda tile: -tile[2])  # tiles with the longest past first: they take longest
    return np.array(found, dtype=np.int32).reshape(-1, 4).T


@dataclass(frozen=True, slots=True)
class SplitRoom:
    """The bounds of the splits of a step."""

    tile_tokens: int  # KV that a program reads at a time
    at_once: int  # entries that the device runs at once; an entry is a program for every KV head
    entries: int  # the most in a step with split tiles; 0: tiles are never split


def split_room(tuning: PrefillTuning, kv_heads: int, processors: int) -> SplitRoom:
    """The bounds for a GPU of so many multiprocessors. A layout of one loop (`one_loop`) has no splits: the
    cuts of a sum, and so its bits, would depend on the rest of the step."""
    at_once = max(1, processors * tuning.per_sm // kv_heads)
    return SplitRoom(tuning.tile_tokens, at_once, 0 if tuning.one_loop else _ROUNDS * at_once)


def split_tiles(tiles: Words, room: SplitRoom) -> Words:
    """Split the KV of `tiles` `[4, tiles]` (see `tiles_of`) into parts, so that a few tiles fill the device.

    A short chunk after a long prefix is one or two tiles, each of which would read the whole prefix in one
    program. The host has all lengths, so it chooses the length of parts with the least predicted time. Tiles
    that fill the device stay whole, because a merge costs time.

    Returns `[7, entries]`, at most `room.entries`, long ones first, with the columns part, parts and merges
    of `kernels.attention.prefill.PrefillSplit`; or `tiles` itself if no tile is split."""
    count = tiles.shape[1]
    if not count or 2 * count > room.entries:
        return tiles
    lengths: list[int] = (-(-(tiles[2] + tiles[3]) // room.tile_tokens)).tolist()
    each = _part_tiles(lengths, room)
    return tiles if each >= max(lengths) else in_parts(tiles, lengths, each)


def in_parts(tiles: Words, lengths: list[int], each: int) -> Words:
    """Split `tiles` `[4, tiles]` with `lengths` tiles of KV into parts of up to `each` tiles of KV."""
    cut = []
    for column, length in zip(tiles.T.tolist(), lengths, strict=True):
        walked = -(-length // -(-length // each))  # as the kernel cuts: the length of all parts but the last
        cut.append((walked, -(-length // walked), column))
    entries: list[tuple[int, ...]] = []
    merges = []
    for _, parts, column in sorted(cut, key=lambda tile: -tile[0]):
        entries += [(*column, part, parts if parts > 1 else 0, 0) for part in range(parts)]
        if parts > 1:
            merges.append(len(entries) - 1)
    found: Words = np.array(entries, dtype=np.int32).reshape(-1, SPLIT_COLUMNS).T
    found[-1, : len(merges)] = merges
    return found


def _part_tiles(lengths: list[int], room: SplitRoom) -> int:
    """The length of parts with the least predicted time, in tiles of KV. Plain numbers take some tens of µs:
    arrays this small are slower."""
    longest, total = max(lengths), sum(lengths)
    most = max(1, room.entries * longest // total)  # parts of the longest tile; more would not fit
    chosen, least = longest, -(-len(lengths) // room.at_once) * (longest + _START) * 1.0
    for each in sorted({-(-longest // parts) for parts in range(2, most + 1)}, reverse=True):
        entries = sum(-(-length // each) for length in lengths)
        rounds = -(-entries // room.at_once)
        cost = rounds * (each + _START) + _MERGE + _PARTS * entries / room.at_once
        if entries <= room.entries and cost < least:
            chosen, least = each, cost
    return chosen


@dataclass(frozen=True, slots=True)
class TilePlan:
    """A step's tiles and layout. `dense`: the chunks for cuDNN."""

    layout: Layout
    tiles: Words
    dense: tuple[Chunk, ...] = ()


class TilePlanner:
    """Cuts the tokens of one engine's steps into tiles of attention."""

    def __init__(self, loaded: Loaded, tuning: DeviceTuning, rows: int) -> None:
        """`rows`: the most sampled rows of a step."""
        shapes, device = loaded.shapes, loaded.cache.tensor.device
        self.apart = not tuning.by_row  # decode rows have their own kernel and graphs
        self._has_dense = (  # cuDNN supports it; its bits may differ by length
            loaded.cache.activations == torch.bfloat16
            and shapes.head_dim in (64, 128)
            and not tuning.by_row
            and not shapes.has_options
        )
        self._tile = tile_queries(shapes.heads, shapes.kv_heads, tuning.prefill)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._splits = split_room(tuning.prefill, shapes.kv_heads, processors)
        self.parts = parts_room(
            self._splits.entries, shapes.kv_heads, tuning.prefill.rows, shapes.head_dim, device
        )
        self.samples = -(-rows // 4) * 4
        self._ragged = _CHUNKS if self.apart else rows

    def tiles(self, chunks: tuple[Chunk, ...]) -> Words:
        return split_tiles(tiles_of(chunks, self._tile), self._splits) if chunks else NO_TILES

    def whole_tiles(self, chunks: tuple[Chunk, ...]) -> Words:
        return tiles_of(chunks, self._tile) if chunks else NO_TILES

    def can_split(self, tokens: int) -> bool:
        """Whether splits can speed up a step of so many tokens."""
        return tokens // self._tile < self._splits.entries

    def layout(self, kind: str, size: int, queries: int = 1) -> Layout:
        """The layout of the graph of a kind for `size` tokens or rows, of `queries` tokens each."""
        if queries > 1:
            tokens = size * queries
            tiles = 0 if self.apart else -(-queries // self._tile) * size
            return Layout(-(-tokens // 4) * 4, tokens, -(-tiles // 4) * 4, queries=queries)
        if kind in ("decode", "sample"):
            return Layout(self.samples, size, 0)
        split = kind == "split"
        tiles = self._splits.entries if split else size // self._tile + min(size, self._ragged)
        return Layout(self.samples, size, -(-tiles // 4) * 4, split)

    def longest(self, tokens: int) -> Layout:
        """The largest layout of steps of up to so many tokens."""
        return Layout(self.samples, tokens, max(tokens, self._splits.entries + 4), split=True)

    def needs_dense(self, step: ArrangedStep) -> bool:
        """Whether a prompt is so long that cuDNN is worth a launch of every kernel of the step."""
        return self._has_dense and any(c.start == 0 and c.count > LONG_TOKENS for c in step.chunks)

    def without_graph(self, step: ArrangedStep) -> TilePlan:
        """The tiles and the exact layout of a step without a graph."""
        dense, rest = split_dense(step.chunks) if self._has_dense else ((), step.chunks)
        tiles = self.tiles(rest)
        room, split = -(-tiles.shape[1] // 4) * 4, len(tiles) == SPLIT_COLUMNS
        return TilePlan(Layout(self.samples, padded(step.tokens), room, split), tiles, dense)


def fill(buffer: Words, layout: Layout, step: ArrangedStep, tiles: Words, spare_slot: int) -> None:
    """Write a step into the first `layout.words` words of `buffer`. `tiles` without the columns of splits: no
    tile is split."""
    samples = buffer[: layout.token_at].reshape(3, -1)
    samples[0], samples[1], samples[2] = 0, spare_slot, 0
    samples[:, : step.samples.shape[1]] = step.samples
    columns = buffer[layout.token_at : layout.token_at + 3 * layout.tokens].reshape(3, -1)
    columns[0, step.tokens :], columns[1:, step.tokens :] = spare_slot, 0
    columns[:, : step.tokens] = step.columns
    buffer[layout.token_at + 3 * layout.tokens] = step.decode_rows
    if layout.tiles:
        named = buffer[layout.tile_at : layout.words].reshape(layout.tile_columns, -1)
        named[:] = 0
        named[: len(tiles), : tiles.shape[1]] = tiles


class InputStaging:
    """The inputs of forwards, in pinned memory and on the device. Queued work reads the step staged last."""

    def __init__(self, loaded: Loaded, slots: CudaSlots, tile_planner: TilePlanner, tokens: int) -> None:
        """`tokens`: the most in a step."""
        self._cache, self._slots, self._parts = loaded.cache, slots, tile_planner.parts
        self._apart = tile_planner.apart
        rows, device = slots.spare_slot, loaded.cache.tensor.device
        words = tile_planner.longest(tokens + rows + 16).words + 2 * len(slots.words)
        zeros = functools.partial(torch.zeros, dtype=torch.int32, device=device)
        self.words: Tensor = zeros(words)
        self._found: Tensor = zeros(2, padded(tokens + rows))
        self._lengths: Tensor = zeros(max(rows, 1))
        self._ring = [torch.empty(words, dtype=torch.int32, pin_memory=True) for _ in range(RING)]
        self._free: list[Event | None] = [None] * RING
        self._turn = 0

    def stage(
        self, layout: Layout, step: ArrangedStep, tiles: Words, updates: tuple[Words, Words] = UNSET
    ) -> None:
        """Copy a step's words to the device and apply the device-state updates."""
        turn, self._turn = self._turn, (self._turn + 1) % RING
        free = self._free[turn]
        if free is not None:
            free.synchronize()
        pinned = self._ring[turn]
        buffer = pinned.numpy()
        fill(buffer, layout, step, tiles, self._slots.spare_slot)
        begin, count = -(-layout.words // 4) * 4, len(updates[0])
        room = -(-count // 4) * 4
        buffer[begin : begin + count] = updates[0]
        buffer[begin + room : begin + room + count] = updates[1]
        end = begin + 2 * room
        move(pinned[:end], self.words)
        if count:
            scatter(
                self.words[begin : begin + count], self.words[begin + room : begin + room + count],
                self._slots.words,
            )  # fmt: skip
        free = self._free[turn] = Event()  # type: ignore[no-untyped-call]  # no annotations in torch
        free.record()

    def step(
        self, layout: Layout, rows: int, dense: tuple[Chunk, ...] = (), *, adapted: bool = False
    ) -> ForwardStep:
        """Launch the kernel that resolves the staged words, and before it the one that proposes drafts if the
        step has any; the tensors of a forward over them. `adapted`: rows may have adapters."""
        tokens, at, queries = layout.tokens, layout.token_at, layout.queries
        found = Resolved(self._found[0, :tokens], self._found[1, :tokens], self._lengths[: max(rows, 1)])
        state, words = self._slots.state, self.words
        slots, ids = words[at : at + tokens], words[at + 2 * tokens : at + 3 * tokens]
        if queries > 1 and state.drafts is not None:
            propose(slots, queries, state.done, state.drafts)
        resolve(words[at:], state, self._cache.spare, self._cache.block_tokens, found, queries)
        tiles = None
        if layout.tiles:
            named = words[layout.tile_at : layout.words].view(layout.tile_columns, -1)
            split = PrefillSplit(named[4], named[5], named[6], self._parts) if layout.split else None
            tiles = PrefillTiles(named[0], named[1], named[2], named[3], state.tables, split)
            if state.drafts is not None and not self._apart:
                place_tiles((named[0], named[1], named[2], named[3]), ids, state.drafts.places, queries)
        decode = None
        if rows:
            decode = DecodeRows(slots[: rows * queries], found.lengths, state.tables, queries, ids)
        positions = words[at + tokens : at + 2 * tokens]
        return ForwardStep(found, positions, decode, tiles, dense, slots if adapted else None)


def keep(hidden: Tensor, sampled: Tensor, rows: Tensor) -> None:
    """Copy the first rows that `rows` names to `sampled`, where the sample graphs read; `rows` then counts
    up."""
    sampled.copy_(hidden.index_select(0, rows[: len(sampled)]))
    torch.arange(len(rows), out=rows)


def padded(tokens: int) -> int:
    return -(-tokens // 16) * 16


class CudaSlots:
    """The state of all slots on a GPU, in one buffer of 32-bit words.

        tables [slots + 1, blocks] | last token | done | place | tokens of the prompt, of the prediction |
        max length | row of the slot table | seed | whether it has a grammar | stop ids

    So an opened slot and a step's block-table deltas are both updates of words. They collect on the host and
    go with the next step's inputs, in one copy and one launch. The last slot is spare: padding uses it.

    Samples of another stage of a pipeline also become updates.

    With drafts the device has the place of each slot's last token, and the tokens before it: those of
    SlotOpen are copied when a step first asks for drafts of the slot, the others are written by the kernels
    that choose them."""

    def __init__(
        self,
        count: int,
        table_blocks: int,
        spare: int,
        max_context: int,
        device: torch.device,
        vocab: int,
        *,
        drafts: bool = False,
    ) -> None:
        """`vocab`: the width of the logits; `drafts`: steps may have some."""
        self._record = SlotTokens(count, max_context)
        self.tokens, self.close = self._record.tokens, self._record.close
        rows = count + 1
        self.spare_slot = count
        self._table_blocks = table_blocks
        self._unset: list[tuple[Words, Words]] = []  # indices in `words`, and values
        self._sampled: dict[int, tuple[int, int]] = {}  # more updates by slot: last token, done
        self._recording = threading.Lock()
        sizes = {
            "table": rows * table_blocks, "last": rows, "done": rows, "place": rows, "prompt": rows,
            "predicted": rows, "length": rows,
            "sampling": len(PARAMETERS) * rows, "seed": 2 * rows, "masked": rows, "stop": STOP_IDS * rows,
        }  # fmt: skip
        begins = np.cumsum([0, *(-(-size // 4) * 4 for size in sizes.values())]).tolist()
        self._at = dict(zip(sizes, begins, strict=False))
        self.words = torch.zeros(begins[-1], dtype=torch.int32, device=device)
        part = {name: self.words[at : at + sizes[name]] for name, at in self._at.items()}
        found = None
        if drafts:
            width = max_context + 1 + min(max_context, MOST_PREDICTED)
            history = torch.zeros(rows, width, dtype=torch.int32, device=device)
            ids = torch.full((rows, 1 + DRAFTS[-1]), NO_TOKEN, dtype=torch.int32, device=device)
            found = DraftState(part["place"], ids, part["length"], part["prompt"], part["predicted"], history)
        self.state = SlotState(part["table"].view(rows, table_blocks), part["last"], part["done"], found)
        # Tokens and predictions of slots that the device's history lacks.
        self._uncopied: dict[int, tuple[Ints, Ints]] = {}
        self._opened = set[int]()  # with updates that are not taken
        self._again = False  # one of them twice
        self.choices = Choices(
            parameters=part["sampling"].view(torch.float32).view(rows, -1),
            seeds=part["seed"].view(torch.int64),
            max_lengths=part["length"],
            stop_ids=part["stop"].view(rows, STOP_IDS),
            last_tokens=part["last"],
            done=part["done"],
            masked=part["masked"],
            masks=mask_room(count, vocab, device),
            places=None if found is None else found.places,
            history=None if found is None else found.history,
        )
        self.state.tables.fill_(spare)
        self.state.done[self.spare_slot] = 1
        self.choices.stop_ids.fill_(NO_TOKEN)

    def open(self, opened: SlotOpen) -> None:
        """Set up a slot with the next step's updates. Raises EngineError for one that cannot be."""
        slot, (limit, stops) = opened.slot, self._record.open(opened)
        self._sampled.pop(slot, None)
        self._again |= slot in self._opened
        self._opened.add(slot)
        self._set("last", slot, [opened.tokens[-1] if opened.tokens else 0])
        self._set("done", slot, [0])
        self._set("place", slot, [max(len(opened.tokens) - 1, 0)])
        self._set("length", slot, [limit])
        if self.state.drafts is not None:
            room = self.state.drafts.history.shape[1] - limit  # after the sequence's own tokens
            predicted = opened.prediction[:room]
            self._set("prompt", slot, [opened.prompt_tokens])
            self._set("predicted", slot, [len(predicted)])
            self._uncopied[slot] = opened.tokens, predicted
        self._set("sampling", slot, slot_row(opened.sampling).view(np.int32))
        self._set("seed", slot, np.array([seed_key(opened.seed)], dtype=np.int64).view(np.int32))
        self._set("masked", slot, [int(bool(opened.grammar))])
        self._set("stop", slot, stops)

    def reset(self) -> None:
        """Forget the updates of slots, which are all closed."""
        self._unset.clear()
        self._sampled.clear()
        self._uncopied.clear()
        self._opened.clear()
        self._again = False

    def copy_histories(self, slots: Ints) -> None:
        """Queue the copies of the tokens of slots that the device's history lacks."""
        drafts = self.state.drafts
        if drafts is None or self._uncopied.keys().isdisjoint(slots):
            return
        for slot in slots:
            tokens, predicted = self._uncopied.pop(slot, ((), ()))
            history = drafts.history[slot]
            for ids, at in ((tokens, 0), (predicted, len(history) - len(predicted))):
                if ids:
                    held = torch.tensor(ids, dtype=torch.int32, pin_memory=history.is_cuda)
                    history[at : at + len(ids)].copy_(held, non_blocking=True)

    def take_updates(self, plan: StepPlan) -> tuple[Words, Words]:
        """The updates before this plan's forward: indices in `words`, and values."""
        at = 0
        for slot, first, count in zip(plan.table_slots, plan.table_first, plan.table_counts, strict=True):
            begin = slot * self._table_blocks + first
            indices = np.arange(begin, begin + count, dtype=np.int32)
            self._unset.append((indices, np.array(plan.table_blocks[at : at + count], dtype=np.int32)))
            at += count
        if self._sampled:
            with self._recording:
                found, self._sampled = self._sampled, {}
            at_slots, values = np.array([*found], dtype=np.int32), np.array([*found.values()], dtype=np.int32)
            self._unset += [
                (self._at["last"] + at_slots, values[:, 0]),
                (self._at["done"] + at_slots, values[:, 1]),
            ]
        taken, self._unset = self._unset, []
        if not taken:
            return UNSET
        places, values = (np.concatenate(column) for column in zip(*taken, strict=True))
        if self._again:  # a slot was opened twice: the device sets all words at once
            places, last = np.unique(places[::-1], return_index=True)
            values = values[::-1][last]
        self._opened.clear()
        self._again = False
        return places, values

    def record_sampled(self, slots: list[int], ids: Ints, done: Ints) -> None:
        """Record the choices of another stage (columns as in StepResult) for the next step's updates. For the
        host thread; these slots are not opened or forwarded meanwhile."""
        with self._recording:
            for slot, token, ended in zip(slots, ids, done, strict=True):
                self._sampled[slot] = max(token, 0), int(ended > 0)

    def _set(self, what: str, slot: int, values: Words | list[int]) -> None:
        words = np.asarray(values, dtype=np.int32)
        begin = self._at[what] + slot * len(words)
        self._unset.append((np.arange(begin, begin + len(words), dtype=np.int32), words))
